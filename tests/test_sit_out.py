"""Ranks that have nothing to contribute to a step: the others go on, and the mean counts their zeros."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import models
import pytest
import torch
from differential import Case, Outcome, batches_of_this_rank, make_trainer, run_case
from models import LateEverywhere, SomeRanks
from package import AdaptiveDDPStrategy, MixedPrecision
from ranks import Ranks

from adaptive_ddp import State
from adaptive_ddp.report import describe_sit_out


def run(ranks: Ranks, case: Case, world_size: int = 2) -> list[Outcome]:
    outcomes = ranks(world_size).run(run_case, case)
    for outcome in outcomes:
        assert outcome.differences == []
    return outcomes


# The state in which the rank sits out, by what is used.
STATES = {
    "PROBE, then WATCH": (models.all_used, (0,)),
    "PROBE, then ON": (models.never_last, (0,)),
    "WATCH": (models.all_used, (2,)),
    "WATCH, then ON": (LateEverywhere(3), (2,)),
    "as it turns ON": (LateEverywhere(2), (2,)),
    "as it turns ON for the others": (SomeRanks(2, 0), (2,)),
    "ON": (models.never_last, (2, 3)),
    "often": (models.OwnBranch(), (0, 1, 3, 4)),
    "last": (models.all_used, (5,)),
}


@pytest.mark.parametrize("how", ["None", "unreached", "constant"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("state", STATES)
def test_the_step_equals_the_oracles(ranks: Ranks, state: str, who: tuple[int, ...], how: str) -> None:
    usage, batches = STATES[state]
    case = Case(partial(models.SitsOut, usage, batches, who, how), batches=6, references=("oracle",))
    outcomes = run(ranks, case)
    if usage is models.all_used:
        # Sitting out is no reason to turn the flag on.
        assert outcomes[0].flags == [False] * 6


@pytest.mark.parametrize("how", ["None", "unreached"])
@pytest.mark.parametrize("out", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("usage", [models.all_used, models.never_last], ids=["clean", "ON"])
def test_in_one_micro_batch_of_an_accumulation(ranks: Ranks, usage: models.Usage, out: int, how: str) -> None:
    model = partial(models.SitsOut, usage, (out,), (1,), how)
    run(ranks, Case(model, batches=6, trainer={"accumulate_grad_batches": 3}, references=("oracle",)))


class SitsOutKeepsZeros(models.SitsOut, models.KeepsZeros):
    pass


class SitsOutNeverZeroes(models.SitsOut, models.NeverZeroes):
    pass


@pytest.mark.parametrize("how", ["None", "unreached"])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("model", [SitsOutKeepsZeros, SitsOutNeverZeroes])
def test_with_gradients_from_before(ranks: Ranks, model: Any, view: bool, how: str) -> None:
    made = partial(model, models.all_used, (0, 3), (0,), how)
    run(ranks, Case(made, batches=6, strategy={"gradient_as_bucket_view": view}, references=("oracle",)))


class SitsOutOfFinish(models.CheckpointedBranches):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        out = batch_idx in (0, 3) and torch.distributed.get_rank() == 1
        return None if out else super().training_step(batch, batch_idx)


class SitsOutOfSparse(models.SparseBranches):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        out = batch_idx in (0, 3) and torch.distributed.get_rank() == 1
        return None if out else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("usage", [models.all_used, models.never_last, LateEverywhere(2)], ids=models.usage_id)
@pytest.mark.parametrize("model", [SitsOutOfFinish, SitsOutOfSparse])
def test_in_finish(ranks: Ranks, model: Any, usage: models.Usage) -> None:
    run(ranks, Case(partial(model, usage), references=("oracle",)))


def test_in_one_micro_batch_with_sparse_gradients(ranks: Ranks) -> None:
    for usage in (models.never_last, LateEverywhere(2)):
        case = Case(partial(SitsOutOfSparse, usage), batches=6, references=("oracle",))
        case.trainer = {"accumulate_grad_batches": 2}
        run(ranks, case)


class AllSitOutOfFinish(models.CheckpointedBranches):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


def test_the_decision_waits_for_a_graph_to_look_into(ranks: Ranks) -> None:
    # Rank 1 misses something in batch 2; the ranks would decide in batch 3, in which nobody has a graph.
    case = Case(partial(AllSitOutOfFinish, SomeRanks(2, 1)), batches=7, references=("oracle",))
    for outcome in run(ranks, case):
        assert outcome.final_decision.state is State.FINISH
        assert outcome.final_decision.step == 3


@pytest.mark.parametrize("how", ["None", "unreached"])
def test_on_one_rank_of_three(ranks: Ranks, how: str) -> None:
    model = partial(models.SitsOut, models.never_last, (0, 3), (1,), how)
    run(ranks, Case(model, tolerance=1e-6, references=("oracle",)), world_size=3)


class ReturnsMapping(models.SitsOut):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else {"loss": loss, "more": batch_idx}


def test_a_mapping_keeps_its_other_entries(ranks: Ranks) -> None:
    model = partial(ReturnsMapping, models.never_last, (2,), (1,), "unreached")
    run(ranks, Case(model, references=("oracle",)))


# -- under a gradient scaler ------------------------------------------------------------------------------------------


def scaled(who: tuple[int, ...], usage: models.Usage) -> list[list[float]]:
    torch.manual_seed(7)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    model = models.SitsOut(usage, (0, 2), who, "None")
    trainer = make_trainer(AdaptiveDDPStrategy(precision_plugin=plugin))
    trainer.fit(model, batches_of_this_rank(Case(lambda: model)))
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("usage", [models.all_used, models.never_last], ids=["clean", "ON"])
@pytest.mark.parametrize("who", [(1,), (0, 1)])
def test_under_a_gradient_scaler(ranks: Ranks, who: tuple[int, ...], usage: models.Usage) -> None:
    first, second = ranks(2).run(scaled, who, usage)
    assert first == second


# -- what is said -----------------------------------------------------------------------------------------------------


def warnings_of_sitting_out(usage: models.Usage, how: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = models.SitsOut(usage, tuple(range(1, 12)), (1,), how)
        make_trainer(AdaptiveDDPStrategy()).fit(model, batches_of_this_rank(Case(lambda: model, 12)))
    return [str(w.message) for w in caught if "sat out" in str(w.message)]


@pytest.mark.parametrize("how", ["None", "unreached"])
@pytest.mark.parametrize("usage", [models.all_used, models.never_last], ids=["clean", "ON"])
def test_the_rank_concerned_says_so_at_1_10_100(ranks: Ranks, usage: models.Usage, how: str) -> None:
    other, concerned = ranks(2).run(warnings_of_sitting_out, usage, how)
    assert other == []
    assert concerned == [describe_sit_out(rank=1, step=2, times=1), describe_sit_out(rank=1, step=11, times=10)]
