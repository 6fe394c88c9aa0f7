"""The command line: `sparkdraft STAGE [--config FILE] [key=value ...]`.

Every stage is a function of (config, run) elsewhere, imported when it is called. Exit codes: 0 done (or stopped with
its state saved), 2 the user's input is wrong (one message, no traceback), 130 interrupted, 1 anything else.
"""

import os
import signal
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from sparkdraft.config import load_config
from sparkdraft.errors import Stopped, UserError
from sparkdraft.files import disk_errors, read_json
from sparkdraft.pipeline import PARENT, open_run
from sparkdraft.processes import end_with_parent

DEFAULT_CONFIG = Path("configs/smollm2-135m-eagle3.yaml")

STAGES = {
    "prepare": (
        "sparkdraft.data.samples:prepare",
        "Answer the prompts with the target; tokenise, mark what is trained on.",
    ),
    "capture": (
        "sparkdraft.features.capture:capture",
        "Run the target once over the samples and keep its hidden states.",
    ),
    "train": (
        "sparkdraft.training.loop:train",
        "Train the draft on the features, going on from the newest checkpoint.",
    ),
    "export": ("sparkdraft.export.eagle3:export", "Write the best checkpoint as a directory that vLLM loads."),
    "evaluate": ("sparkdraft.decoding.evaluate:evaluate", "Decode with the draft and count what the target accepts."),
}

ConfigFile = Annotated[Path, typer.Option("--config", help="A run's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings that replace those of the file.")
]

app = typer.Typer(
    name="sparkdraft",
    help="Train, export and judge speculative-decoding drafts on one DGX Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def exit_code(action: Callable[[], int | None]) -> int:
    """Call `action` and say what went wrong, if anything did; the scripts in train/ and eval/ end with it too.

    SIGTERM ends the action as SystemExit does, so that it cleans up after itself.

    Returns:
        What the action returns (None is 0), 2 for a UserError, 130 for Ctrl-C, 1 for any other error.
    """
    signal.signal(signal.SIGTERM, _terminate)
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    try:
        return action() or 0
    except Stopped as stopped:
        console.print(str(stopped))
        return 0
    except UserError as error:
        console.print(str(error), style="red")
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted. What was finished is kept; the same command goes on from there.")
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def _terminate(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _add_stage(name: str, place: str, summary: str) -> None:
    @app.command(name, help=summary)
    def stage(config: ConfigFile = DEFAULT_CONFIG, overrides: Overrides = None) -> None:
        def action() -> None:
            loaded = load_config(config, overrides)
            module, function = place.split(":")
            getattr(import_module(module), function)(loaded, open_run(loaded))

        raise typer.Exit(exit_code(action))


for _name, (_place, _summary) in STAGES.items():
    _add_stage(_name, _place, _summary)


@app.command()
def report(config: ConfigFile = DEFAULT_CONFIG, overrides: Overrides = None) -> None:
    """Write the report again from the counts of the last evaluation."""

    def action() -> None:
        from sparkdraft.decoding.evaluate import COUNTS
        from sparkdraft.decoding.judgement import Judgement
        from sparkdraft.report.build import build_report

        run = open_run(load_config(config, overrides))
        run.stage_record("evaluate")
        stored = read_json(run.report / COUNTS)
        with disk_errors(run.report):
            build_report(Judgement.from_json(stored["judgement"]), stored["facts"], run.report, run.metrics)

    raise typer.Exit(exit_code(action))


@app.command()
def responses(
    out: Annotated[Path, typer.Option("--out", help="Where to write them.")],
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
) -> None:
    """Answer the built-in prompts with the target, as the files that ship with the package."""

    def action() -> None:
        from sparkdraft.data.regenerate import ship

        loaded = load_config(config, overrides)
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            ship(loaded, out)

    raise typer.Exit(exit_code(action))


@app.command()
def doctor(config: ConfigFile = DEFAULT_CONFIG, overrides: Overrides = None) -> None:
    """Look at what a run needs: packages, cores, memory, disk, the target. Exit code 1: something must be mended."""

    def action() -> int:
        from sparkdraft.doctor import examine

        return examine(load_config(config, overrides))

    raise typer.Exit(exit_code(action))


def main() -> None:
    if PARENT in os.environ:
        end_with_parent(int(os.environ.pop(PARENT)))
    app()


if __name__ == "__main__":
    main()
