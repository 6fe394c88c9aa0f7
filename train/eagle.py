"""Train an EAGLE-3 draft from data to report.

    accelerate launch train/eagle.py [--config FILE] [key=value ...]

Every stage that is finished and whose inputs have not changed is skipped, so the same command goes on after a stop.
`python train/eagle.py` does the same in one process.
"""

import argparse
import sys

from sparkdraft.cli import DEFAULT_CONFIG, exit_code
from sparkdraft.config import load_config
from sparkdraft.pipeline import run_all


def main() -> int:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 draft from data to report.")
    parser.add_argument(
        "--config", default=DEFAULT_CONFIG, type=type(DEFAULT_CONFIG), help="a run's YAML file (%(default)s)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    arguments = parser.parse_intermixed_args()
    return exit_code(lambda: run_all(load_config(arguments.config, arguments.overrides)))


if __name__ == "__main__":
    sys.exit(main())
