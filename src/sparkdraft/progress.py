"""The progress bar of every long stage: on standard error, with a detail (a rate, a loss) and the time left."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(show: bool = True) -> Progress:
    """A bar whose tasks are added with `detail=""`."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(), console=Console(stderr=True), disable=not show,
    )  # fmt: skip
