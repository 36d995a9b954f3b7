"""What is compared: ways to train a model of which a step may leave parameters unused, each a Lightning strategy.

A group holds contenders whose steps are compared with each other and are therefore run next to each other. A contender
that is compared with several others has a copy in each of their groups. "again" is the same thing once more: how far
its ratio is from 1 is what the method cannot tell apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from adaptive_ddp import AdaptiveDDPStrategy, State
from benchmarks.shapes import Shape, Stack, Unused

# all used: every block is used. some unused: as the job says. floor: without what no rank uses. zero trick: see Stack.
Model = Literal["all used", "some unused", "floor", "zero trick"]


class _StaysOff(AdaptiveDDPStrategy):
    """In place of ``fallback="finish"`` in a revision that has no such argument: takes ON for FINISH."""

    def _rewrap_if_due(self) -> None:
        run: Any = self._run
        if run is not None and run.rewrap_with_flag:
            run.rewrap_with_flag = None
            run.state = State.FINISH
        super()._rewrap_if_due()


def finish_strategy() -> DDPStrategy:
    """Our strategy, set to finish each reduction in place once something is unused."""
    has_argument = "fallback" in inspect.signature(AdaptiveDDPStrategy.__init__).parameters
    return AdaptiveDDPStrategy(fallback="finish") if has_argument else _StaysOff()


class AfterTheBackward(DDPStrategy):
    """Reduces once the backward is over, without overlap, zeros in place of None: Horovod's and fairseq's way.

    It has no wrapper. Gradients are packed into buckets of DDP's size, divided, added up and unpacked.
    """

    _BUCKET_BYTES = 25 * 2**20

    def configure_ddp(self) -> None:
        assert isinstance(self.model, LightningModule)
        self._buckets: list[tuple[list[Tensor], Tensor]] = []
        taken: list[Tensor] = []
        for parameter in [*self.model.parameters(), None]:
            if parameter is None or (taken and _bytes([*taken, parameter]) > self._BUCKET_BYTES):
                self._buckets.append((taken, torch.zeros(sum(p.numel() for p in taken), device=self.root_device)))
                taken = []
            if parameter is not None:
                taken.append(parameter)

    def post_backward(self, closure_loss: Tensor) -> None:
        works = []
        for parameters, bucket in self._buckets:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            torch.cat([gradient.view(-1) for gradient in gradients], out=bucket)
            works.append(dist.all_reduce(bucket.div_(dist.get_world_size()), async_op=True))
        for work, (parameters, bucket) in zip(works, self._buckets, strict=True):
            work.wait()
            parts = torch.split(bucket, [parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                # Not a view: the next step packs into the bucket again, while zero_grad may keep the gradients.
                parameter.grad = part.view_as(parameter).clone()


def _bytes(parameters: list[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: unique in its group.
        strategy: makes the strategy.
        model: what it trains.
        ends_in: the state of our strategy that is to be measured.
    """

    name: str
    strategy: Callable[[], DDPStrategy]
    model: Model
    ends_in: State | None = None

    def make_model(self, shape: Shape, unused: Unused | None, rank: int, world_size: int) -> Stack:
        """This contender's own copy of the model."""
        if unused is None or self.model == "all used":
            return Stack(shape)
        if self.model == "floor" and unused.ranks == "same":
            return Stack(shape, absent=unused.everywhere(shape))

        def left_out(step: int) -> frozenset[int]:
            return unused.left_out(shape, rank, world_size, step)

        return Stack(shape, left_out, zero_trick=self.model == "zero trick")

    def is_defined(self, unused: Unused | None) -> bool:
        """Whether it can train this at all."""
        if unused is None:
            return self.model == "all used"
        # Where the ranks differ there is no model without unused parameters, and where they change no static graph.
        return (self.model != "floor" or unused.ranks == "same") and (
            self.name != "static graph" or unused.ranks != "changing"
        )


def flag_strategy() -> DDPStrategy:
    """Lightning's, with the flag on."""
    return DDPStrategy(find_unused_parameters=True)


def static_strategy() -> DDPStrategy:
    """Lightning's, with a static graph."""
    return DDPStrategy(static_graph=True)


_FLAG = Contender("flag", flag_strategy, "some unused")

GROUPS: dict[str, tuple[Contender, ...]] = {
    "clean": (
        Contender("plain", DDPStrategy, "all used"),
        Contender("plain again", DDPStrategy, "all used"),
        Contender("watch", AdaptiveDDPStrategy, "all used", State.WATCH),
        Contender("flag on a clean model", flag_strategy, "all used"),
    ),
    "on": (
        _FLAG,
        Contender("flag again", flag_strategy, "some unused"),
        Contender("on", AdaptiveDDPStrategy, "some unused", State.ON),
    ),
    "finish": (
        _FLAG,
        Contender("finish", finish_strategy, "some unused", State.FINISH),
        Contender("floor", DDPStrategy, "floor"),
    ),
    "others": (
        _FLAG,
        Contender("static graph", static_strategy, "some unused"),
        Contender("zero trick", DDPStrategy, "zero trick"),
        Contender("after the backward", AfterTheBackward, "some unused"),
    ),
}


@dataclass(frozen=True)
class Comparison:
    """A ratio that is reported: of the times of two contenders of one group, and its bar, if it has one."""

    group: str
    contender: str
    reference: str
    bar: float | None = None


COMPARISONS = (
    Comparison("clean", "plain again", "plain"),
    Comparison("clean", "watch", "plain", 1.01),
    Comparison("clean", "flag on a clean model", "plain"),
    Comparison("on", "flag again", "flag"),
    Comparison("on", "on", "flag", 1.01),
    Comparison("finish", "finish", "flag", 1.00),
    Comparison("finish", "finish", "floor", 1.03),
    Comparison("finish", "flag", "floor"),
    Comparison("others", "static graph", "flag"),
    Comparison("others", "zero trick", "flag"),
    Comparison("others", "after the backward", "flag"),
)
