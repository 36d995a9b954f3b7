"""Hand-written loops over several models, the same for Fabric and for the oracle; and models for Fabric alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import models
import torch
import torch.distributed as dist
from differential import Trace, batches_of_this_rank
from fabric_rig import FabricCase, note_gradients, note_weights
from models import WIDTH, Branches, linear_branch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.125, momentum=0.5, weight_decay=0.125)


class Pieces(nn.Module):
    """Three branches after a first layer, as many as are asked for."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pieces = nn.ModuleList([nn.Linear(WIDTH, outputs) for _ in range(3)])

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        hidden = self.first(x).tanh()
        return sum(self.pieces[piece](hidden) for piece in used)


def gan_loop(rig: Any, case: FabricCase, trace: Trace, *, freeze: bool, fresh: bool, accumulate: int = 1) -> None:
    """Generator and discriminator in wrappers of their own; the generator's forward is pending in the other's step."""
    makers = [Pieces(), Pieces(1)]
    (generator, g_optimizer), (discriminator, d_optimizer) = (rig.setup(module, sgd(module)) for module in makers)
    wrappers = [getattr(model, "_forward_module", None) for model in (generator, discriminator)]
    usage = case.model
    for index, batch in enumerate(batches_of_this_rank(case)):
        used = usage(index, dist.get_rank(), dist.get_world_size())
        waits = (index + 1) % accumulate != 0
        with rig.no_sync(generator, enabled=waits), rig.no_sync(discriminator, enabled=waits):
            fake = generator(batch, used)
            rig.backward(discriminator(batch, (0, 1, 2)).mean() * -1, of=(1,))
            rig.backward(discriminator(fake.detach(), used).mean(), of=(1,))
            if not waits:
                note_gradients(rig, trace)
                d_optimizer.step()
                d_optimizer.zero_grad()
            if freeze:
                makers[1].requires_grad_(False)
            if fresh:
                fake = generator(batch, used)
            loss = discriminator(fake, used).square().mean() + fake.tanh().mean()
            rig.backward(loss, of=(0,) if freeze else (0, 1))
            if freeze:
                makers[1].requires_grad_(True)
        if not waits:
            note_gradients(rig, trace)
            g_optimizer.step()
            g_optimizer.zero_grad()
            if not freeze:
                d_optimizer.zero_grad()
        note_weights(rig, trace)
        assert wrappers == [getattr(model, "_forward_module", None) for model in (generator, discriminator)]


def chain_loop(rig: Any, case: FabricCase, trace: Trace, order: tuple[int, int] = (0, 1)) -> None:
    """Two models in one backward. On even ranks the first misses something, on odd ones the second."""
    modules = [Pieces(), Pieces()]
    wrapped = {place: rig.setup(modules[place], sgd(modules[place])) for place in order}
    for index, batch in enumerate(batches_of_this_rank(case)):
        concerned = [index >= 2 and dist.get_rank() % 2 == place for place in (0, 1)]
        hidden = wrapped[0][0](batch, (0, 2) if concerned[0] else (0, 1, 2))
        output = wrapped[1][0](hidden, (0, 2) if concerned[1] else (0, 1, 2))
        rig.backward(output.square().mean())
        note_gradients(rig, trace)
        for _, optimizer in wrapped.values():
            optimizer.step()
            optimizer.zero_grad()
        note_weights(rig, trace)


def heads_loop(rig: Any, case: FabricCase, trace: Trace) -> None:
    """A trunk and two heads, each a model of its own; both heads run, and the loss takes what the usage says."""
    modules = [Pieces(), nn.Linear(WIDTH, 1), linear_branch()]
    trunk, *heads = (rig.setup(module) for module in modules)
    optimizers = [sgd(module) for module in modules]
    for index, batch in enumerate(batches_of_this_rank(case)):
        hidden = trunk(batch, (0, 1, 2))
        outputs = [head(hidden) for head in heads]
        used = case.model(index, dist.get_rank(), dist.get_world_size())
        # Branches 1 and 2 of the usage are the heads; a rank that uses neither has a loss without a graph.
        loss = sum((outputs[head - 1].square().mean() for head in used if head), torch.zeros(()))
        rig.backward(loss)
        note_gradients(rig, trace)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        note_weights(rig, trace)


def closure_loop(rig: Any, case: FabricCase, trace: Trace) -> None:
    """The forward and the backward in a closure that the optimizer calls, several times."""
    module = case.model()
    model, optimizer = rig.setup(module, module.configure_optimizers())
    for index, batch in enumerate(batches_of_this_rank(case)):

        def closure(index: int = index, batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model.training_step(batch, index)
            rig.backward(loss)
            note_gradients(rig, trace)
            return loss

        optimizer.step(closure)
        note_weights(rig, trace)


def regularizer_loop(rig: Any, case: FabricCase, trace: Trace) -> None:
    """A loss of the model's parameters alone, and between a forward and its backward one of nothing of the model's."""
    module = case.model()
    model, optimizer = rig.setup(module, module.configure_optimizers())
    other = torch.ones(2, requires_grad=True)
    for index, batch in enumerate(batches_of_this_rank(case)):
        loss = model.training_step(batch, index)
        if index % 2:
            loss = sum(p.square().sum() for p in module.branches[0].parameters())
        else:
            rig.backward(other.square().sum())
        rig.backward(loss)
        note_gradients(rig, trace)
        optimizer.step()
        optimizer.zero_grad()
        note_weights(rig, trace)


class Hidden(Branches):
    """All of its forward in a reentrant checkpoint: no parameter is in the graph of the loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inner = partial(super().training_step, batch_idx=batch_idx)
        return checkpoint(inner, batch.clone().requires_grad_(True), use_reentrant=True)


def neither_now_and_then(batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
    return (0,) if rank == 1 and batch_idx in (1, 3) else (0, 1, 2)


def neither_on_rank_0(batch_idx: int, rank: int, world_size: int) -> tuple[int, ...]:
    return (0,) if rank == 0 and batch_idx > 0 else (0, 1)


HEADS = [
    models.all_used,
    models.never_last,
    models.SomeRanks(0, 1),
    models.SomeRanks(2, 0),
    models.OwnBranch(),
    neither_now_and_then,
    neither_on_rank_0,
]
