"""Runs speculators' trainer on a CPU, in its own virtual environment, and prints each logged metric as a JSON line.

Three functions that need an accelerator or several ranks are replaced from outside; no file of the package is edited.
"""

import json
import logging
import os
import time

import torch
from speculators.train import dataloader, trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

torch.accelerator.synchronize = lambda *_, **__: None
trainer.get_local_rank = lambda: "cpu"
dataloader._limit_worker_threads = lambda: None
torch.set_num_threads(len(os.sched_getaffinity(0)))


class JsonLines(logging.Handler):
    """Metrics to standard output, with the seconds since the start."""

    start = time.time()

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            print(json.dumps({"t": time.time() - self.start, **record.msg}, default=str), flush=True)


log = logging.getLogger("speculators.metrics")
log.setLevel(logging.INFO)
log.addHandler(JsonLines())
main(TrainConfig.resolve())
