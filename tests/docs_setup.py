"""What the examples of README.md and docs take for granted, and where their commands are run.

A page's Python blocks share a namespace, in order, as a reader would type them. Comments right before a block say more,
and do not show on the page:

* ``<!-- setup: name -->`` before a ``python`` block: first call ``name(namespace)`` of this file.
* ``<!-- raises: Error -->`` before a ``python`` block: it has to end with this error.
* ``<!-- output -->`` before a ``text`` block: the page's Python blocks so far printed this, or warned or raised it.
* ``<!-- output: name -->`` before a ``text`` block: it is what ``name(namespace)`` of this file returns.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import adaptive_ddp
from adaptive_ddp import Decision, State, UnusedParameter

# For each command of a bash block: the test that runs it, or one that takes the same arguments through the same code;
# or ".ci/run".
COMMANDS = {
    'python3 -m venv .venv && .venv/bin/pip install -q -c .ci/constraints.txt -e ".[demo]"'
    " && .venv/bin/python -m adaptive_ddp": (
        "tests/test_main.py::test_it_succeeds_and_prints_no_more_than_its_own_lines"
    ),
    'python3 -m venv .venv && .venv/bin/pip install -q -c .ci/constraints.txt -e ".[test]"'
    " && .venv/bin/python -m pytest": ".ci/run",
    ".venv/bin/mkdocs build --strict -f .mkdocs.yml -d build/site": ".ci/run",
    "python -m adaptive_ddp.picture lightning_logs/version_0/gradient_usage.csv -o usage.png": (
        "tests/test_monitor.py::test_the_command_draws_a_table_that_is_still_being_written"
    ),
    "PYTHONPATH=tests .venv/bin/python -m benchmarks.compare --shape 300 1200 --share 0.1 --steps 200"
    " --output build/benchmarks": (
        "tests/test_benchmarks.py::test_the_quick_run_has_every_ratio_and_finds_equal_weights"
    ),
    ".venv/bin/python tests/search.py --cases 5000 --seed 1": (
        "tests/test_search.py::test_no_drawn_case_differs_from_its_references"
    ),
}


class _Model(pl.LightningModule):
    """With a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def model_and_data(namespace: dict[str, Any]) -> None:
    namespace.update(model=_Model(), data=_batches(4))


def model_optimizer_and_loader(namespace: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    namespace.update(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loader=_batches(4))


def _batches(width: int) -> DataLoader[Tensor]:
    return DataLoader([torch.randn(width) for _ in range(8)], batch_size=2)


def warning_of_the_readme(namespace: dict[str, Any]) -> str:
    """Of a model too large to be trained here, from the same facts through the same code."""
    missed = {
        "model.layers.7.fc1.weight": (1_000_000, 3),
        "model.layers.7.fc1.bias": (2_000, 3),
        "model.layers.7.fc2.weight": (1_000_000, 3),
        "model.layers.7.fc2.bias": (1_000, 3),
        "model.pooler.dense.weight": (2_096_000, 8),
        "model.pooler.dense.bias": (1_000, 8),
    }
    unused = tuple(UnusedParameter(name, numel, missed_by) for name, (numel, missed_by) in missed.items())
    return str(Decision(State.ON, step=1, world_size=8, parameters=148, elements=22_000_000, unused=unused))


def error_of_strict_mode(namespace: dict[str, Any]) -> str:
    """Of a fit with the page's own ``training_step``."""

    class Model(_Model):
        training_step = namespace["training_step"]

        def __init__(self) -> None:
            super(_Model, self).__init__()
            self.encoder, self.color, self.shape = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = adaptive_ddp.AdaptiveDDPStrategy(on_unused="raise")
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **off)
    try:
        trainer.fit(Model(), _batches(8))
    except adaptive_ddp.UnusedParametersError as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    raise AssertionError("the strategy did not raise")
