"""Measure what the monitor costs: ``python docs/scripts/monitor_cost.py``.

Two CPU ranks, plain DDP, real Trainers; models of many small layers, where a step is short and the cost shows most. The
contenders take turns, three times; given is the smallest median CPU time of a step on rank zero, all threads
of the process together, which other programs on the machine disturb little. Under a minute on two idle cores.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from adaptive_ddp import GradientUsageMonitor

WIDTH = 64
SHAPES = {62: 60, 300: 20, 1200: 8}
ROUNDS = 3
SKIPPED = 3


class Deep(pl.LightningModule):
    """As many parameters as wanted."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(parameters // 2))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Any loss."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """Writes the median CPU time of a step to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Look at the clock."""
        self._starts.append(time.process_time())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write, on rank zero."""
        if trainer.is_global_zero:
            steps = [after - before for before, after in pairwise(self._starts[SKIPPED:])]
            self._path.write_text(json.dumps(1000 * median(steps)))


def measure(parameters: int, steps: int, monitored: bool) -> float:
    """The median CPU time of a step in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # First, so that the drawing at the end is not counted.
        callbacks: list[pl.Callback] = [Clock(directory / "ms.json")]
        if monitored:
            callbacks.append(GradientUsageMonitor())
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp_fork",
            max_epochs=1,
            callbacks=callbacks,
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Deep(parameters), torch.utils.data.DataLoader([torch.randn(16, WIDTH)] * steps, batch_size=None))
        return float(json.loads((directory / "ms.json").read_text()))


def main() -> None:
    """Print one line a shape."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for parameters, steps in SHAPES.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for monitored, found in times.items():
                found.append(measure(parameters, steps, monitored))
        without, recorded = min(times[False]), min(times[True])
        print(
            f"{parameters} parameters: {without:.2f} ms a step without, {recorded:.2f} ms recorded: "
            f"{1000 * (recorded - without) / parameters:.1f} us a parameter",
            flush=True,
        )


if __name__ == "__main__":
    main()
