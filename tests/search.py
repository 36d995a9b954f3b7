"""A search for cases in which the strategy and the oracle differ: what a case is, how it is trained, how it is drawn.

A case is a small module with a usage by parameter, rank and step, as plain data: its ``repr`` evaluates to it again.
``python tests/search.py --replay "$(cat case.txt)"`` trains the one case in the file and prints what differs.

What is not drawn, since no data-parallel training of it is defined or DDP cannot serve it with either flag:

* no trainable parameter at all; the parameter called the anchor stays trainable;
* a loss that does not require grad, which a backward refuses on a single device too: an input that requires grad, or a
  zero that does, stands in for it;
* a layer that is used both in a reentrant checkpoint and once more in the same backward: its hook fires twice, and DDP
  stops with "mark a variable ready only once" under either flag;
* checkpointing that first shows after the flag has been turned on: in a case with a checkpoint, the anchor is in one
  that every rank uses on every batch, unless the fallback leaves the flag off;
* weight decay and momentum on sparse gradients, which SGD cannot add to dense weights.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from differential import Tracer, across_ranks, compare, few_tallies, make_trainer
from hypothesis import HealthCheck, Phase, given, seed, settings
from oracle import OracleStrategy
from package import AdaptiveDDPStrategy, DDPStrategy, LightningModule
from ranks import RankError, Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from adaptive_ddp import Decision, trainable
from adaptive_ddp.decision import State

# A case takes a fraction of a second; one that takes this long hangs.
BOUND_S = 15.0
# How long a failing case is made smaller, so that it is printed before pytest's own bound strikes.
SHRINKING_S = 45.0
# Hypothesis draws ever more variations on what it has; a new start draws something else.
ROUND = 200
WIDTH = 3
ROWS = 3
# What the module is when it is wrapped, before the first batch.
AT_WRAPPING = -1


# -- a case -----------------------------------------------------------------------------------------------------------


class _Literal:
    """A ``repr`` that leaves out what has its default."""

    def __repr__(self) -> str:
        given_ones = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(given_ones)})"


@dataclass(frozen=True, repr=False)
class Node(_Literal):
    """A step of the forward: layers one after the other, each of which a rank may skip.

    Attributes:
        layers: their numbers; a number that stands in several places is a shared layer.
        source: whose output it takes: 0 for the batch, n for the n-th node, counted from 1.
        checkpointed: it runs under reentrant activation checkpointing.
        detached: it takes its input without the graph.
    """

    layers: tuple[int, ...]
    source: int = 0
    checkpointed: bool = False
    detached: bool = False


@dataclass(frozen=True, repr=False)
class Skip(_Literal):
    """These ranks do not use a layer's use on these batches; uses are numbered over all nodes."""

    use: int
    ranks: tuple[int, ...]
    batches: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class SitOut(_Literal):
    """These ranks sit out these batches: the step returns None, or a loss that reaches nothing."""

    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    returns_none: bool = True


@dataclass(frozen=True, repr=False)
class Freeze(_Literal):
    """A parameter that is frozen, on all ranks, on these batches; -1 is the moment of wrapping."""

    parameter: str
    batches: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class SearchCase(_Literal):
    """What to train.

    Attributes:
        layers: the kind of each: "linear", "scale", "table" or "sparse".
        nodes: the forward. The loss is over every output that no node takes.
        input_requires_grad: so does the batch.
        fallback: the strategy's argument.
        zero_grad: what happens to gradients between steps: "to None", "to zero" or "never".
        bucket_bytes: the capacity of a bucket, or None for DDP's own.
        backwards_between_tallies: from the second synchronised backward on, a tally in every so many; None for as many
            as ever.
        glance: under the flag, how many parameters are looked at a step for one that was frozen.
    """

    layers: tuple[str, ...]
    nodes: tuple[Node, ...]
    world_size: int = 2
    batches: int = 3
    accumulate: int = 1
    skips: tuple[Skip, ...] = ()
    sit_outs: tuple[SitOut, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    input_requires_grad: bool = False
    fallback: str = "find_unused_parameters"
    optimizer: str = "SGD"
    zero_grad: str = "to None"
    gradient_as_bucket_view: bool = False
    bucket_bytes: int | None = None
    backwards_between_tallies: int | None = None
    glance: int = 32

    # -- what happens in it

    def skipped(self, batch: int, rank: int) -> frozenset[int]:
        return frozenset(skip.use for skip in self.skips if batch in skip.batches and rank in skip.ranks)

    def sits_out(self, batch: int, rank: int) -> SitOut | None:
        return next((out for out in self.sit_outs if batch in out.batches and rank in out.ranks), None)

    def frozen(self, batch: int) -> frozenset[str]:
        return frozenset(freeze.parameter for freeze in self.freezes if batch in freeze.batches)

    def trainable(self, batch: int) -> frozenset[str]:
        return frozenset(f"layers.{n}.{p}" for n, kind in enumerate(self.layers) for p in _PARAMETERS[kind]) - (
            self.frozen(batch)
        )

    def reached(self, batch: int, rank: int) -> frozenset[str]:
        """The parameters that a rank's backward brings a gradient; known from the description alone."""
        if self.sits_out(batch, rank) is not None:
            return frozenset()
        alive = set(self.sinks)
        for number in range(len(self.nodes), 0, -1):
            node = self.nodes[number - 1]
            if number in alive and not node.detached:
                alive.add(node.source)
        skipped = self.skipped(batch, rank)
        names = {
            f"layers.{layer}.{parameter}"
            for use, (number, layer) in enumerate(self.uses)
            if number in alive and use not in skipped
            for parameter in _PARAMETERS[self.layers[layer]]
        }
        return frozenset(names) & self.trainable(batch)

    @property
    def uses(self) -> list[tuple[int, int]]:
        """For each use the number of its node, counted from 1, and its layer."""
        return [(number, layer) for number, node in enumerate(self.nodes, start=1) for layer in node.layers]

    @property
    def sinks(self) -> list[int]:
        taken = {node.source for node in self.nodes}
        return [number for number in range(1, len(self.nodes) + 1) if number not in taken]

    @property
    def windows(self) -> list[range]:
        """The batches of each accumulation window; Lightning ends one at the end of the epoch."""
        return [
            range(first, min(first + self.accumulate, self.batches))
            for first in range(0, self.batches, self.accumulate)
        ]

    @property
    def changes(self) -> bool:
        """Whether the set of trainable parameters changes after wrapping."""
        return any(self.frozen(batch) != self.frozen(AT_WRAPPING) for batch in range(self.batches))

    @property
    def is_checkpointed(self) -> bool:
        return any(node.checkpointed for node in self.nodes)

    @property
    def flag_serves(self) -> bool:
        """Whether ``find_unused_parameters=True`` can train this."""
        return not (self.is_checkpointed or "sparse" in self.layers or self.changes) and all(
            self.reached(batch, rank) for batch in range(self.batches) for rank in range(self.world_size)
        )

    @property
    def tolerance(self) -> float | None:
        # The order in which more than two ranks are added up depends on where a gradient lies in its bucket.
        return None if self.world_size <= 2 else 1e-6

    def expected_decision(self) -> tuple[State, int] | None:
        """The state that the run ends in and the step it is about, where the set of trainable parameters is fixed.

        None where there is no saying: the set changes, or no step shows that everything is used.
        """
        if self.changes:
            return None
        trainable = self.trainable(AT_WRAPPING)
        watched = None
        for step, window in enumerate(self.windows, start=1):
            everywhere = True
            for rank in range(self.world_size):
                received = frozenset().union(*(self.reached(batch, rank) for batch in window))
                sits_out = not self.reached(window[-1], rank)
                everywhere &= not sits_out
                if received != trainable and not sits_out:
                    sparse = any(_is_sparse(self, name) for name in trainable)
                    finishes = sparse or self.is_checkpointed or self.fallback == "finish"
                    return State.FINISH if finishes else State.ON, step
            if everywhere and watched is None:
                watched = State.WATCH, step
        return watched

    def is_decided_by(self, decision: Decision | None) -> bool:
        """Whether a decision is what :meth:`expected_decision` says, or there is no saying."""
        expected = self.expected_decision()
        if expected is None:
            return True
        state, step = expected
        if decision is None or (decision.state is State.WATCH) != (state is State.WATCH):
            return False
        if state is not State.WATCH and not all(
            self.reached(window[-1], rank) for window in self.windows for rank in range(self.world_size)
        ):
            # It is put off while a rank has no graph to look for obstacles in.
            return decision.step >= step
        return (decision.state, decision.step) == expected


# Never frozen; in a case with a checkpoint never skipped, and in one unless the fallback leaves the flag off.
_ANCHOR = "layers.0.weight"
_PARAMETERS = {
    "linear": ("weight", "bias"),
    "scale": ("weight",),
    "table": ("weight",),
    "sparse": ("weight",),
}


# -- its module -------------------------------------------------------------------------------------------------------


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


_MAKE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "scale": _Scale,
    "table": lambda: nn.Embedding(5, WIDTH),
    "sparse": lambda: nn.Embedding(5, WIDTH, sparse=True),
}


class Searched(LightningModule):
    """The module that a case describes."""

    def __init__(self, case: SearchCase) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.ModuleList([_MAKE[kind]() for kind in case.layers])
        if case.tolerance is not None:
            self.double()
        self.set_trainable(AT_WRAPPING)

    def set_trainable(self, batch: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in self.case.frozen(batch))

    @property
    def sparse_ids(self) -> set[int]:
        return {id(layer.weight) for kind, layer in zip(self.case.layers, self.layers, strict=True) if kind == "sparse"}

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.set_trainable(batch_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        case, rank = self.case, dist.get_rank()
        out = case.sits_out(batch_idx, rank)
        if out is not None:
            return None if out.returns_none else torch.zeros((), requires_grad=True) * 1
        skipped = case.skipped(batch_idx, rank)
        # With duplicates, so that sparse gradients are not coalesced; but not where more is added to them, since the
        # order in which coalescing adds up more than two is not defined.
        alone = case.accumulate == 1 and case.zero_grad != "never"
        ids = (torch.arange(ROWS) // (2 if alone else 1) + rank + batch_idx) % 5
        values = [batch.clone().requires_grad_(case.input_requires_grad)]
        use = 0
        for node in case.nodes:
            numbers = range(use, use := use + len(node.layers))
            chain = [layer for number, layer in zip(numbers, node.layers, strict=True) if number not in skipped]

            def forward(x: Tensor, chain: list[int] = chain) -> Tensor:
                for layer in chain:
                    x = self.apply_layer(layer, x, ids)
                return x

            x = values[node.source].detach() if node.detached else values[node.source]
            values.append(checkpoint(forward, x, use_reentrant=True) if node.checkpointed and chain else forward(x))
        loss = sum((values[n] - batch).square().mean() + values[n].tanh().mean() for n in case.sinks)
        return loss if loss.requires_grad else loss + torch.zeros((), requires_grad=True)

    def apply_layer(self, number: int, x: Tensor, ids: Tensor) -> Tensor:
        kind, layer = self.case.layers[number], self.layers[number]
        if kind in ("table", "sparse"):
            return x + layer(ids)
        return layer(x).tanh() if kind == "linear" else layer(x)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if self.case.zero_grad != "never":
            optimizer.zero_grad(set_to_none=self.case.zero_grad == "to None")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Momentum and weight decay move a parameter whose gradient is zero, and leave one alone whose gradient is None.
        if self.case.optimizer == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        sparse = [p for p in self.parameters() if id(p) in self.sparse_ids]
        dense = [p for p in self.parameters() if id(p) not in self.sparse_ids]
        groups = [{"params": dense, "momentum": 0.5, "weight_decay": 0.125}, {"params": sparse}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.125)


# -- training it ------------------------------------------------------------------------------------------------------


class SparseOracle(OracleStrategy):
    """The oracle, except that a gradient that is sparse stays so.

    To a dense one the next gradients are added one by one, a sparse one is coalesced later, in another order.
    """

    def _reduce(self, parameter: Tensor) -> None:
        super()._reduce(parameter)
        if id(parameter) in self.lightning_module.sparse_ids:
            parameter.grad = parameter.grad.to_sparse(1)


@dataclass
class Outcome:
    """What one rank has to say of a case."""

    differences: list[str]
    flags: list[bool]
    states: list[State]
    decision: Decision | None


def run_search_case(case: SearchCase) -> Outcome:
    """Train a case under the strategy and its references on this rank; say where they differ."""
    with few_tallies(case.backwards_between_tallies), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainable, "_GLANCE", case.glance)
        ours, decision = _train(case, AdaptiveDDPStrategy(fallback=case.fallback, **_ddp_options(case)))
    differences = across_ranks(ours.trace)
    references: dict[str, DDPStrategy] = {"oracle": SparseOracle(broadcast_buffers=True)}
    if case.flag_serves:
        references["flag"] = DDPStrategy(find_unused_parameters=True, **_ddp_options(case))
    for name, reference in references.items():
        theirs, _ = _train(case, reference)
        differences += [f"{name}: {text}" for text in compare(ours.trace, theirs.trace, case.tolerance)]
    if not case.is_decided_by(decision):
        differences.append(f"decision: {decision and (decision.state, decision.step)}, not {case.expected_decision()}")
    states = [taken.state if taken else State.PROBE for taken in [*ours.trace.decisions, decision]]
    return Outcome(differences, ours.trace.flags, states, decision)


def _ddp_options(case: SearchCase) -> dict[str, Any]:
    options: dict[str, Any] = {"gradient_as_bucket_view": case.gradient_as_bucket_view}
    if case.bucket_bytes is not None:
        options["bucket_cap_mb"] = case.bucket_bytes / 2**20
    return options


def _train(case: SearchCase, strategy: DDPStrategy) -> tuple[Tracer, Decision | None]:
    torch.manual_seed(7)
    model, tracer = Searched(case), Tracer()
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    dtype = torch.float32 if case.tolerance is None else torch.float64
    data = torch.randn((case.batches, ROWS, WIDTH), generator=generator, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, [tracer], accumulate_grad_batches=case.accumulate)
        trainer.fit(model, DataLoader(list(data), batch_size=None))
    return tracer, getattr(strategy, "decision", None)


# -- drawing one ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Without:
    """Kinds of cases to leave out, to search on while a defect that they show is open."""

    sit_outs: bool = False
    freezes: bool = False
    sparse: bool = False
    checkpoints: bool = False
    # Parameters that are unfrozen and frozen again within one window.
    blinks: bool = False
    # A rank that sits out while a parameter with sparse gradients is frozen now and then.
    sit_outs_with_sparse_freezes: bool = False
    # A rank that sits out one micro-batch of several in a model with sparse gradients.
    sit_outs_in_sparse_accumulation: bool = False
    # A batch that all ranks sit out in a model with a checkpoint.
    all_sitting_out_of_checkpoints: bool = False


@st.composite
def cases(draw: st.DrawFn, without: Without = Without()) -> SearchCase:
    """Draw a case. What it leaves out, and why, is said at the top of the file."""
    world_size = draw(st.sampled_from([2] * 20 + [1, 1, 3, 4]))
    accumulate = draw(st.sampled_from([1, 1, 2, 3]))
    fallback = draw(st.sampled_from(["find_unused_parameters", "finish"]))
    # The second step after the decision is the first in which FINISH fires hooks early.
    batches = draw(st.integers(3, 5 if accumulate == 1 and fallback != "finish" else 6))
    checkpoints = not without.checkpoints and draw(_one_in(4))
    sparse = not without.sparse and draw(_one_in(4))
    layers, nodes = draw(_modules(checkpoints=checkpoints, anchored=fallback != "finish", sparse=sparse))
    case = SearchCase(
        layers=layers,
        nodes=nodes,
        world_size=world_size,
        batches=batches,
        accumulate=accumulate,
        fallback=fallback,
        input_requires_grad=checkpoints or draw(_one_in(4)),
        # Adam makes as much of a gradient of 1e-17 as of one of 1, so it cannot be compared with a tolerance.
        optimizer=draw(st.sampled_from(["SGD", "AdamW"])) if world_size <= 2 and not sparse else "SGD",
        zero_grad=draw(st.sampled_from(["to None", "to None", "to zero", "never"])),
        gradient_as_bucket_view=draw(_one_in(3)),
        bucket_bytes=draw(st.sampled_from([None, 1, 40])),
        backwards_between_tallies=draw(st.sampled_from([None, 2, 3, 100])),
        glance=draw(st.sampled_from([32, 1, 2])),
    )
    # A checkpoint that the anchor is alone in stays as it is.
    uses = [use for use in range(len(case.uses)) if use > 0 or not case.is_checkpointed]
    names = sorted(case.trainable(AT_WRAPPING) - {_ANCHOR})
    skips, sit_outs, freezes = [], [], []
    if uses and draw(st.sampled_from([False, True, True, True])):
        skips = draw(st.lists(_skips(case, uses), min_size=1, max_size=5))
    if not without.sit_outs and draw(_one_in(3)):
        sit_outs = draw(st.lists(_sit_outs(case), min_size=1, max_size=2))
    if not without.freezes and draw(_one_in(2)):
        # One that some rank has long left out is missed by no more ranks than before when it is frozen.
        skipped = {case.uses[skip.use][1] for skip in skips}
        names += [name for name in names if int(name.split(".")[1]) in skipped] * 2
        freezes = draw(st.lists(_freezes(case, names), min_size=1, max_size=3))
    if without.blinks:
        freezes = [freeze for freeze in freezes if not _blinks(case, freeze)]
    if without.sit_outs_with_sparse_freezes and any(_is_sparse(case, freeze.parameter) for freeze in freezes):
        sit_outs = []
    if without.sit_outs_in_sparse_accumulation and sparse and case.accumulate > 1:
        sit_outs = []
    if without.all_sitting_out_of_checkpoints and checkpoints:
        sit_outs = [replace(out, ranks=out.ranks[:1]) for out in sit_outs[:1] if world_size > 1]
    return replace(case, skips=tuple(skips), sit_outs=tuple(sit_outs), freezes=tuple(freezes))


def _is_sparse(case: SearchCase, parameter: str) -> bool:
    return case.layers[int(parameter.split(".")[1])] == "sparse"


def _blinks(case: SearchCase, freeze: Freeze) -> bool:
    return any(
        {window[0] - 1, window[-1]} <= set(freeze.batches) and not set(window) <= set(freeze.batches)
        for window in case.windows
    )


def _one_in(n: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (n - 1) + [True])


@st.composite
def _modules(
    draw: st.DrawFn, checkpoints: bool, anchored: bool, sparse: bool
) -> tuple[tuple[str, ...], tuple[Node, ...]]:
    kinds = ["linear", "linear", "scale", "table"] + ["sparse"] * (3 if sparse else 0)
    layers: list[str] = []
    # Those that may be used once more.
    shareable: list[int] = []
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 4))):
        checkpointed = checkpoints and ((anchored and number == 0) or draw(st.booleans()))
        chain = []
        for _ in range(draw(st.sampled_from([1, 1, 2]))):
            if shareable and not checkpointed and draw(_one_in(6)):
                chain.append(draw(st.sampled_from(shareable)))
                continue
            # A linear layer for the anchor: SGD and DDP take every other kind as a variation on it.
            layers.append(draw(st.sampled_from(kinds)) if layers else "linear")
            chain.append(len(layers) - 1)
            if not checkpointed:
                shareable.append(len(layers) - 1)
        nodes.append(
            Node(
                layers=tuple(chain),
                # A chain or a branch, as it comes.
                source=number if draw(st.booleans()) else draw(st.integers(0, number)),
                checkpointed=checkpointed,
                # With a checkpoint its anchor has to be reached, and its input has to require grad.
                detached=not checkpoints and draw(_one_in(10)),
            )
        )
    if sparse and "sparse" not in layers:
        layers.append("sparse")
        nodes.append(Node(layers=(len(layers) - 1,), source=draw(st.integers(0, len(nodes)))))
    if draw(_one_in(12)):
        # A layer that nothing uses.
        layers.append("linear")
    return tuple(layers), tuple(nodes)


def _subsets(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    everything = tuple(range(size))
    return st.one_of(
        st.just(everything),
        st.integers(0, size - 1).map(lambda first: everything[first:]),
        st.integers(0, size - 1).map(lambda only: (only,)),
        st.sets(st.sampled_from(everything), min_size=1).map(lambda some: tuple(sorted(some))),
    )


@st.composite
def _skips(draw: st.DrawFn, case: SearchCase, uses: list[int]) -> Skip:
    return Skip(
        use=draw(st.sampled_from(uses)), ranks=draw(_subsets(case.world_size)), batches=draw(_subsets(case.batches))
    )


@st.composite
def _sit_outs(draw: st.DrawFn, case: SearchCase) -> SitOut:
    return SitOut(
        ranks=draw(_subsets(case.world_size)),
        batches=draw(_subsets(case.batches)),
        returns_none=draw(st.booleans()),
    )


@st.composite
def _freezes(draw: st.DrawFn, case: SearchCase, names: list[str]) -> Freeze:
    batches = draw(_subsets(case.batches + 1))
    return Freeze(parameter=draw(st.sampled_from(names)), batches=tuple(batch - 1 for batch in batches))


# -- searching --------------------------------------------------------------------------------------------------------


class FoundError(AssertionError):
    """A case in which the strategy and a reference differ."""


@dataclass
class Search:
    """Draws cases, trains them, and counts what they were.

    Attributes:
        trains: what each rank runs of a case.
        without: what is not drawn.
        bound_s: how long a case may take before it counts as hanging.
        counts: of each kind, the cases so far, those of the shrinking of a failing case left out.
    """

    ranks: Ranks
    trains: Callable[[SearchCase], Outcome] = run_search_case
    without: Without = Without()
    bound_s: float = BOUND_S
    shrinks: bool = True
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, number: int, seed_: int) -> None:
        """Draw and train that many different cases, the same ones for the same seed.

        Raises:
            FoundError: with the smallest failing case and how to replay it.
        """
        verdicts: dict[SearchCase, str | None] = {}
        rounds = 0
        # Some cases come up more than once.
        while len(verdicts) < number:
            self._round(verdicts, number, f"{seed_} {rounds}")
            rounds += 1

    def _round(self, verdicts: dict[SearchCase, str | None], number: int, seed_: str) -> None:
        failed_at: float | None = None

        @seed(seed_)
        @settings(
            max_examples=ROUND,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if self.shrinks else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(self.without))
        def check(case: SearchCase) -> None:
            nonlocal failed_at
            # A verdict stands, since hypothesis asks again for the case that it ends with.
            if case not in verdicts:
                enough = len(verdicts) >= number if failed_at is None else time.monotonic() - failed_at > SHRINKING_S
                if enough:
                    return
                verdicts[case] = self._differences(case, counted=failed_at is None)
            if (text := verdicts[case]) is not None:
                failed_at = failed_at or time.monotonic()
                raise FoundError(f"{text}\n\n{how_to_replay(case)}")

        check()

    def _differences(self, case: SearchCase, *, counted: bool) -> str | None:
        try:
            outcomes = self.ranks(case.world_size).run(self.trains, case, bound_s=self.bound_s)
        except RankError as error:
            return str(error)
        if counted:
            self.counts.update(kinds(case, outcomes[0]))
        lines = [f"rank {rank}: {text}" for rank, outcome in enumerate(outcomes) for text in outcome.differences]
        if any(outcome.decision != outcomes[0].decision for outcome in outcomes):
            lines.append(f"decisions: {[outcome.decision for outcome in outcomes]}")
        return "\n".join(lines) or None


def kinds(case: SearchCase, outcome: Outcome) -> set[str]:
    """What a case that was trained counts as: the states it went through, and what its description holds."""
    seen = {
        "cases": True,
        "shared": len({layer for _, layer in case.uses}) < len(case.uses),
        "sparse": "sparse" in case.layers,
        "checkpointed": case.is_checkpointed,
        "detached": any(node.detached for node in case.nodes),
        "accumulating": case.accumulate > 1,
        "sitting out": any(case.sits_out(b, r) for b in range(case.batches) for r in range(case.world_size)),
        "frozen throughout": bool(case.frozen(AT_WRAPPING)) and not case.changes,
        "freezing": case.changes,
        "fallback finish": case.fallback == "finish",
        "bucket views": case.gradient_as_bucket_view,
        "few tallies": case.backwards_between_tallies is not None,
        "also against the flag": case.flag_serves,
        "decision checked": case.expected_decision() is not None,
    }
    return {
        *(kind for kind, holds in seen.items() if holds),
        *(f"through {state.name}" for state in outcome.states),
        f"ends in {outcome.states[-1].name}",
        f"of {case.world_size}",
        f"zero_grad {case.zero_grad}",
        case.optimizer,
    }


def how_to_replay(case: SearchCase) -> str:
    return f"python tests/search.py --replay '{str(case).replace(chr(39), chr(34))}'"


def main() -> None:
    """Replay one case, or search."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--replay", metavar="CASE", help="train the one case that this expression describes")
    what.add_argument("--cases", type=int, help="search this many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="search with one seed after another for about so long")
    parser.add_argument("--without", nargs="*", default=[], choices=[f.name for f in fields(Without)])
    arguments = parser.parse_args()
    ranks = Ranks()
    try:
        if arguments.replay is not None:
            known = (Node, Skip, SitOut, Freeze, SearchCase)
            case = eval(arguments.replay, {kind.__name__: kind for kind in known})
            for rank, outcome in enumerate(ranks(case.world_size).run(run_search_case, case)):
                print(f"rank {rank}: {[state.name for state in outcome.states]}")
                print("\n".join(outcome.differences) or "no difference")
            return
        search = Search(ranks, without=Without(**dict.fromkeys(arguments.without, True)))
        began, seed_ = time.monotonic(), arguments.seed
        try:
            search(arguments.cases, seed_)
            while arguments.seconds and time.monotonic() - began < arguments.seconds:
                seed_ += 1
                search(arguments.cases, seed_)
        finally:
            print(f"seeds {arguments.seed} to {seed_}, {time.monotonic() - began:.0f} s")
            for kind, count in sorted(search.counts.items()):
                print(f"{count:6} {kind}")
    finally:
        ranks.kill()


if __name__ == "__main__":
    # From the module by its own name, under which the ranks import it.
    from search import main as search_main

    search_main()
