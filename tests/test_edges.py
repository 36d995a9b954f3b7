"""Odd but legitimate uses: straddling windows, partial backwards, complex parameters, copies of the module."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import Case, run_case
from models import WIDTH, Branches
from ranks import Ranks
from torch import Tensor, nn


class ByHand(Branches):
    """Manual optimization over the branches that are named."""

    def __init__(self) -> None:
        super().__init__(models.all_used)
        self.automatic_optimization = False

    def loss_of(self, batch: Tensor, used: tuple[int, ...]) -> Tensor:
        hidden = self.trunk(batch)
        return self.loss(sum(self.branches[branch](hidden) for branch in used), batch)

    def step(self, loss: Tensor, **kwargs: Any) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss, **kwargs)
        optimizer.step()
        optimizer.zero_grad()


class WindowOverTheEndOfAStep(ByHand):
    """The flag is decided on in a step that ends with the first micro-batch of the next window."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self.loss_of(batch, (0, 2)))
        if batch_idx % 2 == 0:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss_of(batch, (0, 1, 2)))


class UnfreezesWithinAWindow(WindowOverTheEndOfAStep):
    """The same, where it is the set of trainable parameters that has the module wrapped again."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.extra.requires_grad_(True)

    def loss_of(self, batch: Tensor, used: tuple[int, ...]) -> Tensor:
        return super().loss_of(self.extra(batch), used)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self.loss_of(batch, (0, 1, 2) if batch_idx % 2 == 0 else (0, 2)))
        if batch_idx % 2 == 0:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss_of(batch, (0, 1, 2)))


@pytest.mark.parametrize("model", [WindowOverTheEndOfAStep, UnfreezesWithinAWindow])
def test_a_rewrap_waits_for_the_end_of_a_window(ranks: Ranks, model: Any) -> None:
    for outcome in ranks(2).run(run_case, Case(model, batches=6, references=("oracle",))):
        assert outcome.differences == []


class PartialBackward(ByHand):
    """From a batch on, some ranks' backwards reach less than the graph holds."""

    def __init__(self, partial_from: int, *partial_ranks: int) -> None:
        super().__init__()
        self.partial_from = partial_from
        self.partial_ranks = partial_ranks

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx < self.partial_from:
            self.step(self.loss_of(batch, (0, 2)))
        elif dist.get_rank() in self.partial_ranks:
            inputs = [*self.trunk.parameters(), *self.branches[0].parameters()]
            self.step(self.loss_of(batch, (0, 1, 2)), inputs=inputs)
        else:
            self.step(self.loss_of(batch, (0, 1, 2)))


@pytest.mark.parametrize("partial_from", [0, 2, 5])
@pytest.mark.parametrize("partial_ranks", [(0, 1), (1,)])
def test_a_backward_that_reaches_less_than_the_graph(
    ranks: Ranks, partial_from: int, partial_ranks: tuple[int, ...]
) -> None:
    case = Case(partial(PartialBackward, partial_from, *partial_ranks), batches=6, references=("oracle",))
    for outcome in ranks(2).run(run_case, case):
        assert outcome.differences == []


class BackwardOfSome(Branches):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(inputs=[*self.trunk.parameters(), *self.branches[0].parameters()])


def test_an_overridden_backward_of_some_parameters(ranks: Ranks) -> None:
    case = Case(partial(BackwardOfSome, models.all_used), batches=4, references=("oracle",))
    for outcome in ranks(2).run(run_case, case):
        assert outcome.differences == []


class ComplexFirst(models.SitsOut):
    """A complex parameter that is the module's first."""

    def __init__(self, usage: models.Usage) -> None:
        super().__init__(usage, (3,), (1,), "None")
        self.z = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else loss + (self.z * batch).abs().mean()


def test_sitting_out_of_a_model_with_complex_parameters(ranks: Ranks) -> None:
    for outcome in ranks(2).run(run_case, Case(partial(ComplexFirst, models.never_last), references=("oracle",))):
        assert outcome.differences == []


class CopiesItself(Branches):
    """Makes a copy within its step, as one does for a teacher."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            trainer, self._trainer = self._trainer, None
            teacher = copy.deepcopy(self)
            torch.save(self, io.BytesIO())
            self._trainer = trainer
            with torch.no_grad():
                for parameter in teacher.parameters():
                    parameter.zero_()
                # With zeros for weights and inputs; the original's weights would give something else.
                assert teacher.training_step(torch.zeros_like(batch), 0) == 0
        return super().training_step(batch, batch_idx)


def test_a_copy_made_within_a_step_is_a_module_of_its_own(ranks: Ranks) -> None:
    for outcome in ranks(2).run(run_case, Case(partial(CopiesItself, models.all_used), references=("plain",))):
        assert outcome.differences == []
