"""The set of trainable parameters changes during training."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import CONTENDERS, Case, Outcome, batches_of_this_rank, make_trainer, run_case
from models import Freezes, LateEverywhere, SomeRanks
from package import AdaptiveDDPStrategy, BackboneFinetuning, seed_everything
from ranks import RankError, Ranks
from torch import nn


def run(ranks: Ranks, case: Case) -> list[Outcome]:
    outcomes = ranks(2).run(run_case, case)
    for outcome in outcomes:
        assert outcome.differences == []
    return outcomes


OFF, ON = False, True

# batch -> {branch: trainable}, and what is frozen when the module is wrapped.
SCHEDULES = {
    "unfrozen later": ({2: {1: ON}}, {1: OFF}),
    "frozen later": ({2: {1: OFF}}, {}),
    "frozen, then unfrozen": ({1: {1: OFF}, 3: {1: ON}}, {}),
    "one in exchange for another": ({2: {0: OFF, 1: ON}}, {1: OFF}),
    "all but one frozen": ({2: {0: OFF, 1: OFF}}, {}),
    "every step another": ({n: {0: bool(n % 2), 1: not n % 2} for n in range(6)}, {}),
    "at the first step": ({0: {1: ON}}, {1: OFF}),
    "at the last step": ({5: {1: ON}}, {1: OFF}),
}


@pytest.mark.parametrize(
    "usage",
    [models.all_used, models.never_last, LateEverywhere(2), SomeRanks(0, 1), SomeRanks(2, 0)],
    ids=models.usage_id,
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_changed_set_is_reduced_from_the_step_on(ranks: Ranks, schedule: str, usage: models.Usage) -> None:
    changes, at_first = SCHEDULES[schedule]
    run(ranks, Case(partial(Freezes, usage, changes, at_first), batches=6, references=("oracle",)))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 2, 3])
def test_a_change_in_the_middle_of_an_accumulation(ranks: Ranks, batch: int, view: bool) -> None:
    for changes, at_first in (({batch: {1: ON}}, {1: OFF}), ({batch: {1: OFF}}, {})):
        case = Case(
            partial(Freezes, models.all_used, changes, at_first),
            batches=6,
            strategy={"gradient_as_bucket_view": view},
            trainer={"accumulate_grad_batches": 3},
            references=("oracle",),
        )
        run(ranks, case)


@pytest.mark.parametrize("batches", [(3, 4), (4, 5), (3, 5)])
def test_a_parameter_that_is_trainable_for_a_part_of_a_window(ranks: Ranks, batches: tuple[int, int]) -> None:
    unfrozen, frozen = batches
    model = partial(Freezes, models.all_used, {unfrozen: {1: ON}, frozen: {1: OFF}}, {1: OFF})
    run(ranks, Case(model, batches=9, trainer={"accumulate_grad_batches": 3}, references=("oracle",)))


class FrozenSparse(models.SparseBranches):
    """Rank 1 sits out while a table with sparse gradients is frozen."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        self.tables[1].requires_grad_(batch_idx != 2)
        return None if batch_idx == 2 and dist.get_rank() == 1 else super().training_step(batch, batch_idx)


def test_sitting_out_while_a_sparse_parameter_is_frozen(ranks: Ranks) -> None:
    for usage in (models.all_used, models.never_last):
        run(ranks, Case(partial(FrozenSparse, usage), references=("oracle",)))


class FreezesTheLastOfMany(models.Branches):
    """All ranks freeze the last of more parameters than are looked at in a step, and rank 0 sits out."""

    def __init__(self, freeze_at: int, sit_out_at: tuple[int, ...]) -> None:
        super().__init__(models.never_last)
        self.many = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(30))
        self.freeze_at = freeze_at
        self.sit_out_at = sit_out_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        if batch_idx == self.freeze_at:
            self.many[-1].requires_grad_(False)
        if batch_idx in self.sit_out_at and dist.get_rank() == 0:
            return None
        return super().training_step(batch, batch_idx) + sum(layer(batch).square().mean() for layer in self.many)


@pytest.mark.parametrize("sit_out_at", [(3,), (2, 3), (3, 4)], ids=str)
def test_a_rank_that_sits_out_sees_a_frozen_parameter_no_earlier_than_the_others(
    ranks: Ranks, sit_out_at: tuple[int, ...]
) -> None:
    # Under the flag, which takes a frozen parameter for an unused one, each step looks at a few.
    run(ranks, Case(partial(FreezesTheLastOfMany, 3, sit_out_at), batches=8, references=("oracle",)))


@pytest.mark.parametrize("fallback", ["finish", "find_unused_parameters"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_is_frozen_that_one_rank_has_long_left_out(ranks: Ranks, rank: int, fallback: str) -> None:
    model = partial(Freezes, SomeRanks(1, rank), {5: {1: OFF}})
    run(ranks, Case(model, batches=8, ours={"fallback": fallback}, references=("oracle",)))


def moved(contender: str) -> list[bool]:
    """Whether branch 1 moved in each step, under AdamW, which moves a parameter whose gradient is zero."""
    seed_everything(7, verbose=False)
    found = []

    class Watched(Freezes):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.before = self.branches[1][0].weight.detach().clone()

        def on_train_batch_end(self, *args: Any) -> None:
            found.append(not torch.equal(self.before, self.branches[1][0].weight))

    make_trainer(CONTENDERS[contender]()).fit(
        Watched(models.all_used, {2: {1: OFF}}), batches_of_this_rank(Case(Watched))
    )
    return found


def test_a_frozen_weight_does_not_move_from_the_step_on(ranks: Ranks) -> None:
    assert ranks(2).run(moved, "adaptive") == [[True, True, False, False, False]] * 2


class Backbone(models.Branches):
    """Two branches as a backbone that a callback of Lightning's unfreezes, and one as its head."""

    def __init__(self, usage: models.Usage) -> None:
        super().__init__(usage)
        self.backbone = self.branches[:2]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.5)


def finetuned(contender: str, usage: models.Usage) -> dict[str, torch.Tensor]:
    seed_everything(7, verbose=False)
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1, verbose=False)
    model = Backbone(usage)
    trainer = make_trainer(CONTENDERS[contender](), [callback], max_epochs=3)
    trainer.fit(model, batches_of_this_rank(Case(Backbone)))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("usage", [models.all_used, models.never_last, SomeRanks(0, 1)], ids=models.usage_id)
def test_backbone_finetuning(ranks: Ranks, usage: models.Usage) -> None:
    expected = ranks(2).run(finetuned, "oracle", usage)
    ours = ranks(2).run(finetuned, "adaptive", usage)
    for weights in ours:
        assert all(torch.equal(weights[name], expected[0][name]) for name in weights)


@pytest.mark.parametrize("contender", ["plain", "flag"])
def test_backbone_finetuning_lets_ranks_drift_apart_under_ddp(ranks: Ranks, contender: str) -> None:
    # The reason for all this. It fails when torch or Lightning mends it.
    first, second = ranks(2).run(finetuned, contender, models.all_used)
    assert any(not torch.equal(first[name], second[name]) for name in first)


class ToggledForEver(models.Gan):
    """Toggles one optimizer a step, and never untoggles."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        which = batch_idx % 2
        optimizer = self.optimizers()[which]
        self.generator.requires_grad_(which == 0)
        self.discriminator.requires_grad_(which == 1)
        output = self.discriminator(self.generator(batch)).mean()
        self.manual_backward(output if which else -output)
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_that_is_toggled_and_never_untoggled(ranks: Ranks) -> None:
    run(ranks, Case(partial(ToggledForEver, False), batches=6, references=("oracle",)))


def alternate() -> list[str]:
    schedule = {n: {0: bool(n % 2), 1: not n % 2} for n in range(12)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(AdaptiveDDPStrategy()).fit(
            Freezes(models.all_used, schedule), batches_of_this_rank(Case(Freezes, 12))
        )
    return [str(w.message) for w in caught if "has changed" in str(w.message)]


def test_wrapping_again_often_is_said_once_with_its_cost(ranks: Ranks) -> None:
    first, second = ranks(2).run(alternate)
    assert second == []
    assert len(first) == 1
    assert "has changed 10 times in 10 steps" in first[0]
    assert "ms on average" in first[0]


# -- what cannot be served --------------------------------------------------------------------------------------------


def split(changes: dict[int, dict[int, bool]], at_first: dict[int, bool], usage: models.Usage) -> str:
    model = Freezes(usage, changes, at_first, ranks=(1,))
    with pytest.raises(RuntimeError) as raised:
        make_trainer(AdaptiveDDPStrategy()).fit(model, batches_of_this_rank(Case(Freezes, 6)))
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("usage", [models.all_used, models.never_last], ids=["WATCH", "ON"])
@pytest.mark.parametrize("batch", [0, 2, 4])
def test_a_set_that_changes_on_one_rank_is_an_error_on_all(ranks: Ranks, batch: int, usage: models.Usage) -> None:
    for errors in (
        ranks(2).run(split, {batch: {1: ON}}, {1: OFF}, usage),
        ranks(2).run(split, {batch: {1: OFF}}, {}, usage),
    ):
        assert errors[0] == errors[1]
        assert f"by step {batch + 1}" in errors[0]
        assert "branches.1.{0,2}.{weight,bias}" in errors[0]
    assert "only on rank 0:" in errors[0]


def split_at_the_end() -> str:
    model = Freezes(models.all_used, {2: {1: ON}}, {1: OFF}, ranks=(1,))
    with pytest.raises(RuntimeError) as raised:
        make_trainer(AdaptiveDDPStrategy()).fit(model, batches_of_this_rank(Case(Freezes, 3)))
    return str(raised.value)


def test_a_split_in_the_last_step_is_an_error_too(ranks: Ranks) -> None:
    errors = ranks(2).run(split_at_the_end)
    assert "only on rank 1:" in errors[0]
    assert errors[0] == errors[1]


def test_the_ranks_can_go_on_after_such_an_error(ranks: Ranks) -> None:
    # No rank is left in a collective of the run that failed.
    ranks(2).run(split_at_the_end)
    run(ranks, Case(partial(models.Branches, models.never_last)))


class Grows(models.Branches):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.grown = torch.nn.Linear(models.WIDTH, models.WIDTH)


def grow() -> str:
    with pytest.raises(RuntimeError) as raised:
        make_trainer(AdaptiveDDPStrategy(), max_epochs=3).fit(Grows(models.all_used), batches_of_this_rank(Case(Grows)))
    return str(raised.value)


def test_added_parameters_are_named_at_the_next_epoch(ranks: Ranks) -> None:
    for error in ranks(2).run(grow):
        assert "grown.{weight,bias}" in error
        assert "would never reduce" in error


def test_without_looking_at_the_set_ranks_drift_apart(ranks: Ranks) -> None:
    try:
        wrong = ranks(2).run(unseen_change, bound_s=10)
    except RankError:
        return
    assert all(wrong)


def unseen_change() -> bool:
    from adaptive_ddp.trainable import TrainableSet

    original = TrainableSet.unfrozen
    TrainableSet.unfrozen = lambda self: []
    try:
        changes, at_first = SCHEDULES["unfrozen later"]
        case = Case(partial(Freezes, models.all_used, changes, at_first), batches=6, references=("oracle",))
        return bool(run_case(case).differences)
    finally:
        TrainableSet.unfrozen = original
