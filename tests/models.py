"""The modules that the behaviour tests train: what a rank uses in a step is given from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from package import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4

# usage(batch_idx, rank, world_size) -> the branches that this rank uses on this batch
Usage = Callable[[int, int, int], tuple[int, ...]]


def usage_id(usage: Usage) -> str:
    """The name of a test's parameter, the same in every process."""
    name = getattr(usage, "__name__", type(usage).__name__)
    return f"{name}{tuple(vars(usage).values())}" if vars(usage) else name


def all_used(batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
    return (0, 1, 2)


def never_last(batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
    return (0, 1)


def never_first(batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
    return (1, 2)


class LateEverywhere:
    """From the given batch on, no rank uses branch 1."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        return (0, 1, 2) if batch_idx < self.first else (0, 2)


class SomeRanks:
    """From the given batch on, the given ranks do not use branch 1."""

    def __init__(self, first: int, *missing_ranks: int) -> None:
        self.first = first
        self.missing_ranks = missing_ranks

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        return (0, 2) if batch_idx >= self.first and rank in self.missing_ranks else (0, 1, 2)


class OnlyOnce:
    """On one batch only, the given ranks do not use branch 1."""

    def __init__(self, only: int, *missing_ranks: int) -> None:
        self.only = only
        self.missing_ranks = missing_ranks

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        return (0, 2) if batch_idx == self.only and rank in self.missing_ranks else (0, 1, 2)


class OwnBranch:
    """Each rank uses branch 0 and one of its own."""

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        return (0, 1 + (batch_idx + rank) % 2)


class OwnLater:
    """Nobody uses branch 2; from batch 3 on rank 0 does; from batch 6 on rank 0 uses nothing but it."""

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        if rank or batch_idx < 3:
            return (0, 1)
        return (0, 1, 2) if batch_idx < 6 else (2,)


class InMicroBatch:
    """Of every window of ``length`` micro-batches only number ``used_in`` uses branch 1, on the given ranks."""

    def __init__(self, used_in: int, length: int, *ranks: int) -> None:
        self.used_in = used_in
        self.length = length
        self.ranks = ranks

    def __call__(self, batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
        uses = rank in self.ranks and batch_idx % self.length == self.used_in
        return (0, 1, 2) if uses else (0, 2)


class Branches(LightningModule):
    """A trunk and three branches, with a loss over what the branches in use return."""

    def __init__(self, usage: Usage, dyadic: bool = False, branch: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.usage = usage
        self.dyadic = dyadic
        make = branch or linear_branch
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList([make() for _ in range(3)])
        if dyadic:
            make_dyadic(self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        hidden = self.trunk(batch)
        used = self.usage(batch_idx, dist.get_rank(), dist.get_world_size())
        output = sum(self.branches[branch](hidden) for branch in used)
        return self.loss(output, batch)

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        if self.dyadic:
            return (output * batch).sum() / 8
        return (output - batch).square().mean() + output.tanh().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.dyadic:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(8).round_().div_(8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Momentum and weight decay move a parameter whose gradient is zero, and leave one alone whose gradient is None.
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, weight_decay=0.125)


def linear_branch() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def make_dyadic(module: nn.Module) -> None:
    """Double precision and weights that are multiples of 1/8.

    With inputs that are small integers and a loss that is linear in the output all sums are then exact, so that the
    order in which an all-reduce adds up more than two ranks does not show. It depends on where a gradient lies in its
    bucket, and buckets are laid out differently with the flag on and off. The weights are rounded after each step.
    """
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape) / 8)


class Gan(LightningModule):
    """Two networks, two optimizers, manual optimization; the discriminator's step uses the generator detached."""

    def __init__(self, toggle: bool, zero_all: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.zero_all = zero_all
        self.generator = linear_branch()
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        if self.toggle:
            self.toggle_optimizer(first)
        generated = self.generator(batch)
        self.manual_backward(-self.discriminator(generated).mean())
        first.step()
        first.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        real, fake = self.discriminator(batch), self.discriminator(self.generator(batch).detach())
        if self.zero_all:
            second.zero_grad()
        self.manual_backward(fake.mean() - real.mean())
        second.step()
        second.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(second)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=0.05),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.5, weight_decay=0.1),
        ]


class BatchNormBranches(Branches):
    """Branches that keep running statistics, which differ between ranks unless they are broadcast."""

    def __init__(self, usage: Usage) -> None:
        super().__init__(usage, branch=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))


class SharedBranches(Branches):
    """Branches 0 and 1 end in one layer, branches 1 and 2 begin with one."""

    def __init__(self, usage: Usage) -> None:
        super().__init__(usage)
        self.branches[1][2] = self.branches[0][2]
        self.branches[2][0] = self.branches[1][0]


class WideBranches(Branches):
    """Over a hundred parameters a branch: torch's message lists only the first hundred that are missing."""

    def __init__(self, usage: Usage) -> None:
        super().__init__(usage, branch=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(60)]))

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return super().loss(output.tanh(), batch)


class IgnoringBranches(Branches):
    """Tells DDP to leave branch 1's first layer alone; it has no gradient on some ranks, and is no business of ours."""

    def __init__(self, usage: Usage) -> None:
        super().__init__(usage)
        self._ddp_params_and_buffers_to_ignore = ["branches.0.0.weight", "branches.1.0.bias"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kept = [p for n, p in self.named_parameters() if n not in self._ddp_params_and_buffers_to_ignore]
        return torch.optim.SGD(kept, lr=0.125, momentum=0.5, weight_decay=0.125)


class KeepsZeros(Branches):
    """Sets gradients to zero between steps instead of None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class NeverZeroes(Branches):
    """Keeps adding to the gradients of the steps before."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        pass


class LocalGradient(Branches):
    """Gives branch 1 a gradient of the rank's own before each backward; while it is unused DDP has no part in it."""

    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.branches[1].parameters():
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())


class OneParameter(LightningModule):
    """A model of a single parameter, which some ranks' losses do not reach."""

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self.usage = usage
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if 1 in self.usage(batch_idx, dist.get_rank(), dist.get_world_size()):
            return (self.weight * batch).square().mean()
        return torch.zeros((), requires_grad=True) * 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, weight_decay=0.125)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class BlockedBranch(Branches):
    """Branch 1 is in the graph, but a custom autograd function lets no gradient through to it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.trunk(batch)
        used = self.usage(batch_idx, dist.get_rank(), dist.get_world_size())
        output = sum(
            self.branches[b](hidden) if b in used else _NoGradient.apply(self.branches[b](hidden)) for b in range(3)
        )
        return self.loss(output, batch)


class ReturnsMore(Branches):
    """Returns the unused branch's output beside the loss, with its graph."""

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "extra": self.branches[1](self.trunk(batch))}


class LbfgsBranches(Branches):
    """An optimizer that runs several forwards and backwards a step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class CheckpointedBranches(Branches):
    """Branches run under reentrant activation checkpointing, all of them or all but the given one."""

    def __init__(self, usage: Usage, plain_branch: int | None = None) -> None:
        super().__init__(usage)
        self.plain_branch = plain_branch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.trunk(batch)
        used = self.usage(batch_idx, dist.get_rank(), dist.get_world_size())
        output = sum(
            self.branches[b](hidden)
            if b == self.plain_branch
            else checkpoint(self.branches[b], hidden, use_reentrant=True)
            for b in used
        )
        return self.loss(output, batch)


class PartlyCheckpointed(Branches):
    """Inside the checkpointed part something is used on some ranks only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        used = self.usage(batch_idx, dist.get_rank(), dist.get_world_size())

        def inner(hidden: Tensor) -> Tensor:
            return sum(self.branches[b](hidden) for b in used)

        return self.loss(checkpoint(inner, self.trunk(batch), use_reentrant=True), batch)


class LateCheckpoint(Branches):
    """Branch 2, where it is used, runs under reentrant checkpointing; the others never do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.trunk(batch)
        used = self.usage(batch_idx, dist.get_rank(), dist.get_world_size())
        output = sum(self.branches[b](hidden) for b in used if b < 2)
        if 2 in used:
            output = output + checkpoint(self.branches[2], hidden, use_reentrant=True)
        return self.loss(output, batch)


class AsksFirst(Branches):
    """Its own backward first takes gradients by the hidden layer, or by a parameter, from the graph of the loss."""

    def __init__(self, usage: Usage, by_parameter: bool) -> None:
        super().__init__(usage)
        self.by_parameter = by_parameter

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.hidden = self.trunk(batch)
        used = self.usage(batch_idx, dist.get_rank(), dist.get_world_size())
        return self.loss(sum(self.branches[branch](self.hidden) for branch in used), batch)

    def backward(self, loss: Tensor) -> None:
        asked = self.trunk.weight if self.by_parameter else self.hidden
        torch.autograd.grad(loss, asked, retain_graph=True)
        loss.backward()


class SparseBranches(LightningModule):
    """A trunk, with sparse embeddings added to what goes into it and out of it, as far as they are used.

    The embedding's gradient shares memory with the gradient that flows on to the layers before it.
    """

    def __init__(self, usage: Usage, bag: bool = False) -> None:
        super().__init__()
        self.usage = usage
        make = nn.EmbeddingBag if bag else nn.Embedding
        self.bag = bag
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tables = nn.ModuleList([make(10, WIDTH, sparse=True) for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids = torch.arange(len(batch)) + dist.get_rank()
        x = self.first(batch)
        for table in self.usage(batch_idx, dist.get_rank(), dist.get_world_size()):
            x = x + self.tables[table](ids[:, None] if self.bag else ids)
        return (self.last(x) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


class SitsOut(Branches):
    """On the given batches the given ranks have nothing to contribute, in one of two ways."""

    def __init__(self, usage: Usage, batches: tuple[int, ...], ranks: tuple[int, ...], how: str) -> None:
        super().__init__(usage)
        self.out_batches = batches
        self.out_ranks = ranks
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx in self.out_batches and dist.get_rank() in self.out_ranks:
            loss = {"None": None, "unreached": torch.zeros((), requires_grad=True) * 1, "constant": torch.zeros(())}
            return loss[self.how]
        return super().training_step(batch, batch_idx)


class Freezes(Branches):
    """Freezes and unfreezes branches by a schedule: batch -> {branch: trainable}, on the given ranks."""

    def __init__(
        self,
        usage: Usage,
        schedule: dict[int, dict[int, bool]],
        at_first: dict[int, bool] | None = None,
        ranks: tuple[int, ...] | None = None,
        model: str = "linear",
    ) -> None:
        super().__init__(usage)
        self.schedule = schedule
        self.ranks = ranks
        self.set_trainable(at_first or {})

    def set_trainable(self, branches: dict[int, bool]) -> None:
        for branch, trainable in branches.items():
            self.branches[branch].requires_grad_(trainable)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.ranks is None or dist.get_rank() in self.ranks:
            self.set_trainable(self.schedule.get(batch_idx, {}))
