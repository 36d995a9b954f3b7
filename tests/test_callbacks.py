"""Lightning's own callbacks over a fallback in the middle of training: their work is done, to the bits of the flag."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import CONTENDERS, Case, Flags, batches_of_this_rank, make_trainer, shared_directory
from models import SomeRanks
from package import Callback, CSVLogger, Trainer, callbacks, seed_everything
from ranks import Ranks
from torch import Tensor

from adaptive_ddp import UnusedParametersWarning

BATCHES = 4
EPOCHS = 4
# Optimizer steps that end before the first one in which rank 1 leaves a branch unused.
FALLBACK_AFTER = 5

Weights = dict[str, Tensor]


class Scheduled(models.BatchNormBranches):
    """The branch goes unused from an optimizer step on; the learning rate falls with each epoch."""

    def __init__(self) -> None:
        super().__init__(SomeRanks(FALLBACK_AFTER, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, self.trainer.global_step)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        # Rank 0 always gets better, rank 1 never does.
        self.log("own", -float(self.trainer.global_step) if dist.get_rank() == 0 else 0.0, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def fit(strategy: Any, callback: Callback | None, ckpt_path: Path | None = None, **kwargs: Any) -> tuple[Weights, Any]:
    seed_everything(7, verbose=False)
    model = Scheduled()
    flags = Flags()
    trainer = make_trainer(strategy, [flags, *([callback] if callback else [])], **{"max_epochs": EPOCHS, **kwargs})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedParametersWarning)
        trainer.fit(model, batches_of_this_rank(Case(models.Branches, BATCHES)), ckpt_path=ckpt_path)
    trainer.flags = flags.flags
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, trainer


# What shows that a callback did its work: read from the callback and the trainer after the fit.
Evidence = Callable[[Any, Trainer], Any]

CALLBACKS: dict[str, tuple[Callable[[], Callback], Evidence, Any]] = {
    "StochasticWeightAveraging": (
        partial(callbacks.StochasticWeightAveraging, swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1),
        # Epochs 1 to 3 averaged, and one more forward over the data for the batch norms.
        lambda callback, trainer: (int(callback.n_averaged), trainer.current_epoch),
        (3, EPOCHS + 1),
    ),
    "WeightAveraging": (
        callbacks.WeightAveraging,
        lambda callback, trainer: int(callback._average_model.n_averaged),
        BATCHES * EPOCHS,
    ),
    "EMAWeightAveraging": (
        partial(callbacks.EMAWeightAveraging, decay=0.75),
        lambda callback, trainer: int(callback._average_model.n_averaged),
        BATCHES * EPOCHS,
    ),
    "EarlyStopping": (
        partial(callbacks.EarlyStopping, monitor="own", patience=2, check_on_train_epoch_end=True),
        # It is rank 1 that has had enough.
        lambda callback, trainer: (trainer.current_epoch, trainer.global_step),
        (3, 3 * BATCHES),
    ),
    "LearningRateMonitor": (
        partial(callbacks.LearningRateMonitor, logging_interval="epoch"),
        lambda callback, trainer: callback.lrs["lr-SGD"],
        [0.125, 0.0625, 0.03125, 0.015625],
    ),
    "GradientAccumulationScheduler": (
        partial(callbacks.GradientAccumulationScheduler, {0: 1, 1: 2, 2: 4}),
        lambda callback, trainer: trainer.global_step,
        4 + 2 + 1 + 1,
    ),
}


def train(name: str, contender: str, options: dict[str, Any]) -> tuple[Weights, Any, Any, list[bool]]:
    make, evidence, _ = CALLBACKS[name]
    callback = make()
    logger = CSVLogger(shared_directory()) if name == "LearningRateMonitor" else False
    strategy = CONTENDERS[contender](**options)
    weights, trainer = fit(strategy, callback, logger=logger)
    return weights, evidence(callback, trainer), getattr(strategy, "decision", None), trainer.flags


def compare(name: str, fallback: str) -> tuple[list[str], Any, int, list[bool]]:
    ours, done, decision, flags = train(name, "adaptive", {"fallback": fallback})
    theirs, expected, _, _ = train(name, "flag", {})
    different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    assert done == expected
    gathered: list[Any] = [None] * dist.get_world_size()
    # Running statistics are each rank's own until the next forward.
    dist.all_gather_object(gathered, {key: ours[key] for key in ours if key.endswith(("weight", "bias"))})
    different += [f"rank 0's {key}" for key, tensor in gathered[0].items() if not torch.equal(tensor, ours[key])]
    return different, done, decision.step, flags


@pytest.mark.parametrize("fallback", ["find_unused_parameters", "finish"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_does_its_work_over_a_fallback(ranks: Ranks, name: str, fallback: str) -> None:
    for different, done, step, flags in ranks(2).run(compare, name, fallback):
        assert different == []
        assert done == CALLBACKS[name][2]
        assert step == FALLBACK_AFTER + 1
        # Rank 0, which used everything, learns of it one step later.
        assert flags[: FALLBACK_AFTER + 1] == [False] * (FALLBACK_AFTER + 1)
        assert set(flags[FALLBACK_AFTER + 1 :]) == {fallback == "find_unused_parameters"}


# -- ModelCheckpoint --------------------------------------------------------------------------------------------------


def save_and_resume(
    contender: str, epochs: tuple[int, ...], options: dict[str, Any]
) -> tuple[list[Weights], list[str]]:
    """An uninterrupted fit, and one resumed from the checkpoint of each of the given epochs."""
    directory = shared_directory()
    checkpoints = callbacks.ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, monitor="loss")
    weights, _ = fit(CONTENDERS[contender](**options), checkpoints, enable_checkpointing=True)
    found = [weights]
    for epoch in epochs:
        path = directory / f"epoch={epoch}.ckpt"
        weights, trainer = fit(CONTENDERS[contender](**options), None, path)
        assert trainer.global_step == BATCHES * EPOCHS
        found.append(weights)
    return found, sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("fallback", ["find_unused_parameters", "finish"])
def test_a_checkpoint_resumes_to_the_bits_of_the_uninterrupted_run(ranks: Ranks, fallback: str) -> None:
    # Epoch 0 ends before the fallback, epoch 2 after it.
    ours = ranks(2).run(save_and_resume, "adaptive", (0, 2), {"fallback": fallback})
    theirs = ranks(2).run(save_and_resume, "flag", (), {})
    for (runs, saved), ((expected,), names) in zip(ours, theirs, strict=True):
        assert saved == names == [f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)]
        for weights in runs:
            assert [key for key in expected if not torch.equal(weights[key], expected[key])] == []
