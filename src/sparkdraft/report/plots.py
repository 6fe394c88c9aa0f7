"""Plots as inline SVG whose ink is the page's text colour, so that they are readable in light and dark."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# a kind of prompt may hold a `$`: labels are text, never formulas
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "sparkdraft", "text.parse_math": False}
)

_INK, _ACCENT = "#010203", "#3b82f6"
_LONGEST_LABEL = 40


def bars(
    labels: Sequence[str], values: Sequence[float], axis: str, horizontal: bool = False, start: float = 0.0,
    limit: float | None = None,
) -> str:  # fmt: skip
    """A bar chart with each value written at its bar."""
    figure = Figure(figsize=(6.4, 0.8 + 0.32 * len(labels)) if horizontal else (6.4, 3.0))
    axes = figure.subplots()
    lengths, places = [value - start for value in values], range(len(labels))
    short = [label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…" for label in labels]
    if horizontal:
        drawn = axes.barh(places, lengths, left=start, color=_ACCENT, tick_label=short)
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        axes.margins(x=0.12)
    else:
        drawn = axes.bar(places, lengths, bottom=start, color=_ACCENT, tick_label=short)
        axes.set_xlabel(axis)
        axes.set_ylim(start, limit)
    axes.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3)
    return _svg(figure, axes)


def curves(series: Mapping[str, Sequence[tuple[float, float]]], axis: str) -> str:
    """One or two lines over a common axis."""
    figure = Figure(figsize=(6.4, 3.0))
    axes = figure.subplots()
    for (name, points), style in zip(series.items(), ("-", "--"), strict=False):
        marker = "." if len(points) < 30 else None
        axes.plot(*zip(*points, strict=True), style, label=name, color=_ACCENT, marker=marker)
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=_INK)
    axes.set_xlabel(axis)
    return _svg(figure, axes)


def _svg(figure: Figure, axes: Axes) -> str:
    axes.spines[["top", "right"]].set_visible(False)
    for item in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels(), *axes.texts):
        item.set_color(_INK)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.tick_params(colors=_INK)
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser brings the font
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img" style="width:100%;height:auto"', text, count=1)
