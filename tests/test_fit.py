"""What a fit leaves behind and what surrounds it: checkpoints, resuming, smoke runs, other loops, a second fit."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import (
    CONTENDERS,
    Case,
    Flags,
    across_ranks,
    batches_of_this_rank,
    make_trainer,
    run_case,
    shared_directory,
    train,
)
from models import LateEverywhere, OnlyOnce, SomeRanks
from package import AdaptiveDDPStrategy, Callback, DDPStrategy, LightningModule, Trainer, seed_everything
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

from adaptive_ddp import State, UnusedParametersWarning


def fit(strategy: DDPStrategy, model: LightningModule, batches: int = 4, **kwargs: Any) -> Trainer:
    trainer = make_trainer(strategy, **kwargs)
    trainer.fit(model, batches_of_this_rank(Case(lambda: model, batches)), ckpt_path=kwargs.pop("ckpt_path", None))
    return trainer


# -- smoke runs -------------------------------------------------------------------------------------------------------

SMOKE = {
    "fast_dev_run": {"fast_dev_run": 1},
    "max_steps": {"max_steps": 1},
    "one batch, accumulating": {"limit_train_batches": 1, "accumulate_grad_batches": 4},
}


@pytest.mark.parametrize("usage", [models.never_last, models.never_first, SomeRanks(0, 1)], ids=models.usage_id)
@pytest.mark.parametrize("smoke", SMOKE)
def test_a_smoke_run_ends_with_equal_weights_and_the_warning(ranks: Ranks, smoke: str, usage: models.Usage) -> None:
    outcomes = ranks(2).run(run_case, Case(partial(models.Branches, usage), trainer=SMOKE[smoke]))
    for outcome in outcomes:
        assert outcome.differences == []
    assert [len(outcome.warnings) for outcome in outcomes] == [1, 0]


def plain_smoke_run(smoke: dict[str, Any]) -> list[str]:
    trace, _ = train(Case(partial(models.Branches, models.never_first), trainer=smoke), "plain")
    return across_ranks(trace)


@pytest.mark.parametrize("smoke", SMOKE)
def test_a_smoke_run_under_plain_ddp_ends_with_different_weights(ranks: Ranks, smoke: str) -> None:
    # The reason for the test above. It fails when torch mends this.
    group = ranks(2)
    assert all(group.run(plain_smoke_run, SMOKE[smoke]))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(contender: str, usage: models.Usage) -> dict[str, Any]:
    _, trainer = train(Case(partial(models.Branches, usage)), contender)
    path = shared_directory() / "run.ckpt"
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False)


def test_a_checkpoint_has_the_keys_of_one_of_ddp(ranks: Ranks) -> None:
    ours = ranks(2).run(save_checkpoint, "adaptive", models.never_last)[0]
    theirs = ranks(2).run(save_checkpoint, "flag", models.never_last)[0]
    assert ours.keys() == theirs.keys()
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    assert ours["loops"].keys() == theirs["loops"].keys()


def resume(first: str, second: str, usage: models.Usage) -> dict[str, torch.Tensor]:
    """Two epochs under one strategy, then two more from its checkpoint under another."""
    path = shared_directory() / "run.ckpt"
    seed_everything(7, verbose=False)
    trainer = make_trainer(CONTENDERS[first](), max_epochs=2)
    trainer.fit(models.Branches(usage), batches_of_this_rank(Case(models.Branches)))
    trainer.save_checkpoint(path)
    trainer = make_trainer(CONTENDERS[second](), max_epochs=4)
    model = models.Branches(usage)
    trainer.fit(model, batches_of_this_rank(Case(models.Branches)), ckpt_path=str(path))
    assert trainer.global_step == 20
    return model.state_dict()


@pytest.mark.parametrize("usage", [models.never_last, LateEverywhere(2), SomeRanks(3, 1)], ids=models.usage_id)
def test_resuming_in_both_directions(ranks: Ranks, usage: models.Usage) -> None:
    expected = ranks(2).run(resume, "flag", "flag", usage)[0]
    for first, second in (("adaptive", "flag"), ("flag", "adaptive"), ("adaptive", "adaptive")):
        for weights in ranks(2).run(resume, first, second, usage):
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


# -- a second fit, and other loops ------------------------------------------------------------------------------------


def fit_twice() -> tuple[list[bool], list[State], list[bool]]:
    flags = Flags()
    trainer = make_trainer(AdaptiveDDPStrategy(), [flags])
    model = models.Branches(LateEverywhere(1))
    data = batches_of_this_rank(Case(models.Branches, 3))
    states, hooks = [], []
    for _ in range(2):
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(model, data)
        states.append(trainer.strategy.decision.state)
        hooks.append(any(p._post_accumulate_grad_hooks for p in model.parameters()))
    return flags.flags, states, hooks


def test_a_second_fit_starts_with_the_flag_off(ranks: Ranks) -> None:
    for flags, states, hooks_left in ranks(2).run(fit_twice):
        assert flags == [False, True, True] * 2
        assert states == [State.ON, State.ON]
        assert hooks_left == [False, False]


class Fails(models.Branches):
    """Fails in the first epoch, at a place of its own choice, on all ranks."""

    def __init__(self, where: str) -> None:
        super().__init__(LateEverywhere(3))
        self.where = where

    def fail_at(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 1 and not getattr(self, "failed", False):
            self.failed = True
            raise OSError(where)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.fail_at("forward", batch_idx)
        if self.where == "backward":
            loss.register_hook(lambda gradient: self.fail_at("backward", batch_idx))
        return loss

    def on_after_backward(self) -> None:
        self.fail_at("hook", self.trainer.fit_loop.batch_idx)


def fit_again_after(where: str) -> tuple[list[str], list[float]]:
    seed_everything(7, verbose=False)
    model = Fails(where)
    # Kept, as an interactive session keeps the last traceback with all its frames.
    errors = []
    for _ in range(2):
        try:
            make_trainer(AdaptiveDDPStrategy()).fit(model, batches_of_this_rank(Case(models.Branches)))
        except OSError as error:
            errors.append(error)
    hooks = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    assert hooks == []
    return [str(error) for error in errors], model.trunk.weight.flatten().tolist()


@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
def test_a_fit_after_one_that_failed(ranks: Ranks, where: str) -> None:
    first, second = ranks(2).run(fit_again_after, where)
    assert first == second
    assert first[0] == [where]


class WithOtherLoops(models.Branches):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validated", self.branches[2](batch).mean(), sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("tested", self.branches[2](batch).mean(), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.branches[2](batch)


def other_loops(contender: str) -> list[Any]:
    seed_everything(7, verbose=False)
    model = WithOtherLoops(LateEverywhere(2))
    data = batches_of_this_rank(Case(models.Branches, 6))
    trainer = make_trainer(CONTENDERS[contender](), val_check_interval=2)
    before = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data, data)
    after = [trainer.validate(model, data, verbose=False), trainer.test(model, data, verbose=False)]
    wrapped = isinstance(trainer.strategy.model, DistributedDataParallel)
    return [before, *after, [p.tolist() for p in trainer.predict(model, data)], wrapped]


def test_validate_test_and_predict_give_what_they_give_under_the_flag(ranks: Ranks) -> None:
    assert ranks(2).run(other_loops, "adaptive") == ranks(2).run(other_loops, "flag")


# -- hooks see the finished reduction ---------------------------------------------------------------------------------


class CollectiveInHook(Callback):
    """Does what users do in ``on_after_backward``: looks at gradients, and asks the other ranks something."""

    def __init__(self) -> None:
        self.spread: list[float] = []
        self.known: list[bool] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        norm = torch.stack([p.grad.norm() for p in pl_module.parameters() if p.grad is not None]).sum()
        gathered = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, norm)
        self.spread.append(float(max(gathered) - min(gathered)))
        self.known.append(trainer.strategy.decision is not None)


def collective_in_hook(usage: models.Usage) -> tuple[list[float], list[bool]]:
    seen = CollectiveInHook()
    fit(AdaptiveDDPStrategy(), models.Branches(usage), callbacks=[seen])
    return seen.spread, seen.known


@pytest.mark.parametrize(
    "usage", [models.never_first, SomeRanks(0, 0), SomeRanks(2, 1), OnlyOnce(1, 0)], ids=models.usage_id
)
def test_on_after_backward_sees_the_same_gradients_on_all_ranks(ranks: Ranks, usage: models.Usage) -> None:
    for spread, decision_known in ranks(2).run(collective_in_hook, usage):
        assert spread == [0.0] * 4
        assert decision_known == [True] * 4


# -- compiled modules -------------------------------------------------------------------------------------------------


def fit_compiled(contender: str, usage: models.Usage, whole: bool) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    seed_everything(7, verbose=False)
    model = models.Branches(usage)
    if whole:
        compiled = torch.compile(model, backend="aot_eager")
    else:
        model.trunk.compile(backend="aot_eager")
        for branch in model.branches:
            branch.compile(backend="aot_eager")
        compiled = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedParametersWarning)
        make_trainer(CONTENDERS[contender]()).fit(compiled, batches_of_this_rank(Case(models.Branches)))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("usage", [models.never_last, LateEverywhere(2), SomeRanks(2, 1)], ids=models.usage_id)
def test_compiled_modules(ranks: Ranks, usage: models.Usage, whole: bool) -> None:
    expected = ranks(2).run(fit_compiled, "flag", usage, whole)[0]
    for weights in ranks(2).run(fit_compiled, "adaptive", usage, whole):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


# -- what a step costs ------------------------------------------------------------------------------------------------


def collectives(contender: str) -> list[int]:
    """The number of collectives that this rank starts in each training step, as torch's profiler counts them."""
    counts: list[int] = []

    class Counter(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.__enter__()

        def on_train_batch_end(self, *args: Any) -> None:
            dist.barrier()
            self.profiler.__exit__(None, None, None)
            events = self.profiler.key_averages()
            counts.append(sum(e.count for e in events if e.key == "gloo:all_reduce"))

    fit(CONTENDERS[contender](), models.Branches(models.all_used), callbacks=[Counter()])
    return counts


def test_a_clean_step_costs_one_all_reduce_more_than_under_plain_ddp(ranks: Ranks) -> None:
    ours, plain = ranks(2).run(collectives, "adaptive")[0], ranks(2).run(collectives, "plain")[0]
    assert plain[0] > 0
    assert [a - b for a, b in zip(ours, plain, strict=True)] == [1] * 4
