"""The models that are trained: a stem, blocks with a residual connection around each, and a head.

Any block may be left out of a step, and then its parameters get no gradient. The initial weights of a block depend on
its number alone, so a model without some blocks starts with the same weights as the others that both have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

Place = Literal["early", "late"]
Ranks = Literal["same", "different", "some", "changing"]
NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Shape:
    """A kind of model.

    Attributes:
        blocks: how many blocks it has; a stem and a head come on top.
        block: makes one.
        stem: makes what comes first.
        head: makes what comes last, and gives one number an example.
        batch: the shape of a rank's batch.
    """

    blocks: int
    block: Callable[[], nn.Module]
    stem: Callable[[], nn.Module]
    head: Callable[[], nn.Module]
    batch: tuple[int, ...]


@dataclass(frozen=True)
class Unused:
    """Which blocks a step leaves out.

    Attributes:
        share: the share of the blocks that are concerned; at least one is.
        place: at the beginning of the forward, where gradients come last, or at its end.
        ranks: "same": every rank leaves all of them out. "different": every rank leaves out a part of its own, so that
            each is used by some rank. "some": every other rank leaves all of them out, the rest use them. "changing":
            every rank draws anew at each step which half it leaves out.
    """

    share: float
    place: Place
    ranks: Ranks

    def concerned(self, shape: Shape) -> frozenset[int]:
        """The blocks that are left out on some rank."""
        count = max(1, round(self.share * shape.blocks))
        return frozenset(range(count) if self.place == "early" else range(shape.blocks - count, shape.blocks))

    def everywhere(self, shape: Shape) -> frozenset[int]:
        """The blocks that no rank uses at any step."""
        return self.concerned(shape) if self.ranks == "same" else NONE

    def left_out(self, shape: Shape, rank: int, world_size: int, step: int) -> frozenset[int]:
        """The blocks that one rank leaves out of one step."""
        concerned = sorted(self.concerned(shape))
        if self.ranks == "same":
            return frozenset(concerned)
        if self.ranks == "some":
            return NONE if rank % 2 else frozenset(concerned)
        if self.ranks == "different":
            return frozenset(concerned[rank::world_size])
        return frozenset(random.Random(f"{step} {rank}").sample(concerned, (len(concerned) + 1) // 2))


class Stack(LightningModule):
    """A model of some shape, with an optimizer that tells a gradient of zero from none.

    Args:
        shape: its shape.
        left_out: the blocks to leave out, for the number of a step.
        absent: the blocks that it is built without.
        zero_trick: add zero times every parameter to the loss.
    """

    def __init__(
        self,
        shape: Shape,
        left_out: Callable[[int], frozenset[int]] = lambda step: NONE,
        absent: frozenset[int] = NONE,
        *,
        zero_trick: bool = False,
    ) -> None:
        super().__init__()
        self.left_out = left_out
        self.zero_trick = zero_trick
        torch.manual_seed(shape.blocks)
        self.stem, self.head = shape.stem(), shape.head()
        self.blocks = nn.ModuleDict()
        for number in range(shape.blocks):
            torch.manual_seed(number)
            if number not in absent:
                self.blocks[str(number)] = shape.block()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        left_out = self.left_out(batch_idx)
        x = self.stem(batch)
        for name, block in self.blocks.items():
            if int(name) not in left_out:
                x = x + block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss + 0 * sum(parameter.sum() for parameter in self.parameters()) if self.zero_trick else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Fused, so that what is compared is not lost beside a loop over the parameters. By the decay a gradient of zero
        # differs from none.
        return torch.optim.SGD(self.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)


class _ScaledLinear(nn.Linear):
    """A linear layer with small weights, so that thousands of them in a row neither die out nor blow up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, width)
        with torch.no_grad():
            self.weight.mul_(depth**-0.5)
            self.bias.mul_(depth**-0.5)


def _narrow(parameters: int) -> Shape:
    depth = (parameters - 4) // 2
    return Shape(
        blocks=depth,
        block=lambda: nn.Sequential(_ScaledLinear(32, depth), nn.Tanh()),
        stem=lambda: nn.Linear(16, 32),
        head=lambda: nn.Linear(32, 1),
        batch=(32, 16),
    )


def _convolutions() -> nn.Module:
    first, second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
    return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), second, nn.BatchNorm2d(16))


class _TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(128), nn.LayerNorm(128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.feedforward = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        attended: Tensor = self.attention(normed, normed, normed, need_weights=False)[0]
        output: Tensor = attended + self.feedforward(self.feedforward_norm(x + attended))
        return output


SHAPES: dict[str, Shape] = {
    "62": _narrow(62),
    "300": _narrow(300),
    "1200": _narrow(1200),
    "5000": _narrow(5000),
    "resnet": Shape(
        blocks=20,
        block=_convolutions,
        stem=lambda: nn.Conv2d(3, 16, 3, padding=1),
        head=lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1)),
        batch=(4, 3, 16, 16),
    ),
    "transformer": Shape(
        blocks=24,
        block=_TransformerBlock,
        stem=lambda: nn.Linear(16, 128),
        head=lambda: nn.Sequential(nn.Flatten(), nn.Linear(128 * 8, 1)),
        batch=(2, 8, 16),
    ),
    "wide": Shape(
        blocks=10,
        block=lambda: _ScaledLinear(768, 10),
        stem=lambda: nn.Linear(16, 768),
        head=lambda: nn.Linear(768, 1),
        batch=(16, 16),
    ),
}
