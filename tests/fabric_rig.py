"""Train by hand with Fabric under several strategies in one group of ranks, and compare step by step, bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from differential import Case, Trace, _copy, across_ranks, batches_of_this_rank, compare
from package import Fabric, FabricAdaptiveDDPStrategy, FabricDDPStrategy, seed_everything
from torch import Tensor, nn

from adaptive_ddp import Decision, UnusedParametersWarning

CONTENDERS: dict[str, Callable[..., FabricDDPStrategy]] = {
    "adaptive": FabricAdaptiveDDPStrategy,
    "flag": lambda **kwargs: FabricDDPStrategy(find_unused_parameters=True, **kwargs),
    "plain": FabricDDPStrategy,
}


class FabricRig:
    """What a loop needs, from a real Fabric."""

    def __init__(self, contender: str, fabric: dict[str, Any], **options: Any) -> None:
        self.fabric = make_fabric(CONTENDERS[contender](**options), **fabric)
        self.modules: list[nn.Module] = []

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        self.modules.append(module)
        return self.fabric.setup(module, *optimizers)

    def backward(self, loss: Tensor, of: tuple[int, ...] = ()) -> None:
        self.fabric.backward(loss)

    def no_sync(self, model: Any, enabled: bool) -> AbstractContextManager[Any]:
        return self.fabric.no_backward_sync(model, enabled=enabled)


class OracleRig:
    """The same loop without DDP: after a backward, what some rank used is reduced by one gather a parameter."""

    def __init__(self) -> None:
        self.fabric = None
        self.modules: list[nn.Module] = []
        self._used: set[Tensor] = set()
        self._accumulating: set[nn.Module] = set()

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        self.modules.append(module)
        for parameter in module.parameters():
            trainable = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._note)
            parameter.requires_grad_(trainable)
        return (module, *optimizers) if optimizers else module

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._used.add(parameter)

    @contextmanager
    def no_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        if enabled:
            self._accumulating.add(model)
        try:
            yield
        finally:
            self._accumulating.discard(model)

    def backward(self, loss: Tensor, of: tuple[int, ...] = ()) -> None:
        """The backward of all modules, or of those that are named by their places."""
        if loss.requires_grad:
            loss.backward()
        for module in [self.modules[place] for place in of] or self.modules:
            if module in self._accumulating:
                continue
            parameters = list(module.parameters())
            used = torch.tensor([parameter in self._used for parameter in parameters]).int()
            dist.all_reduce(used)
            for parameter, used_by in zip(parameters, used.tolist(), strict=True):
                if used_by:
                    self._reduce(parameter)
            self._used.difference_update(parameters)

    def _reduce(self, parameter: Tensor) -> None:
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().contiguous()
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        total = torch.zeros_like(mine)
        for gradient in gathered:
            total += gradient / dist.get_world_size()
        parameter.grad = total


def make_fabric(strategy: Any, **kwargs: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


@dataclass
class FabricCase(Case):
    """What to train, by which loop, and what it has to be equal to."""

    loop: Callable[[Any, FabricCase, Trace], None] | None = None
    accumulate: int = 1
    clip: float | None = None
    fabric: Callable[[], dict[str, Any]] = dict


@dataclass
class FabricOutcome:
    """What the parent process gets to see of a case on one rank."""

    differences: list[str]
    flags: list[bool]
    decisions: tuple[Decision | None, ...]
    warnings: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def note_gradients(rig: Any, trace: Trace) -> None:
    trace.gradients.append(
        {f"{i}.{name}": _copy(p.grad) for i, m in enumerate(rig.modules) for name, p in m.named_parameters()}
    )


def note_weights(rig: Any, trace: Trace) -> None:
    trace.weights.append(
        {f"{i}.{name}": t.clone() for i, m in enumerate(rig.modules) for name, t in m.state_dict().items()}
    )


def simple_loop(rig: Any, case: FabricCase, trace: Trace) -> None:
    """One model, one optimizer, gradient accumulation."""
    module = case.model()
    model, optimizer = rig.setup(module, module.configure_optimizers())
    wrapper = None if rig.fabric is None else model._forward_module
    for index, batch in enumerate(batches_of_this_rank(case)):
        ends = (index + 1) % case.accumulate == 0
        module.on_train_batch_start(batch, index)
        with rig.no_sync(model, enabled=not ends):
            loss = model.training_step(batch, index)
            rig.backward(torch.zeros((), requires_grad=True) if loss is None else loss)
        if ends:
            note_gradients(rig, trace)
            if rig.fabric is not None:
                assert model._forward_module is wrapper
                trace.flags.append(wrapper.find_unused_parameters)
                if case.clip is not None:
                    rig.fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.training_step(batch, index)
        module.on_train_batch_end(None, batch, index)
        note_weights(rig, trace)


def train(case: FabricCase, contender: str) -> tuple[Trace, Any, list[warnings.WarningMessage]]:
    seed_everything(7, verbose=False)
    trace = Trace()
    rig: Any = OracleRig()
    if contender != "oracle":
        ours = case.ours if contender == "adaptive" else {}
        rig = FabricRig(contender, case.fabric(), **case.strategy, **ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (case.loop or simple_loop)(rig, case, trace)
    return trace, rig, caught


def run_case(case: FabricCase) -> FabricOutcome:
    """Train under our strategy and its references on this rank; say where they differ."""
    trace, rig, caught = train(case, "adaptive")
    differences = across_ranks(trace) if case.ranks_are_equal else []
    for reference in case.references:
        expected, _, _ = train(case, reference)
        differences += [f"{reference}: {text}" for text in compare(trace, expected, case.tolerance)]
    unused = [str(w.message) for w in caught if issubclass(w.category, UnusedParametersWarning)]
    others = [str(w.message) for w in caught if w.category is UserWarning]
    return FabricOutcome(differences, trace.flags, rig.fabric.strategy.decisions, unused, others)
