"""Text from a :class:`~adaptive_ddp.decision.Decision` or a :class:`~adaptive_ddp.verdict.Verdict`; the warning.

Promise: at most a dozen lines of names whatever the model, grouped as a person would write them, and nothing in them
that is not true of the run. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from adaptive_ddp.decision import Decision, State, UnusedParameter
from adaptive_ddp.verdict import Advice, ParameterUsage, Verdict

T = TypeVar("T")

SIT_OUT_OF_A_FIT = "its training_step returned None, or a loss that reaches no parameter"
SIT_OUT_OF_A_LOOP = "its loss reaches none of the model's parameters"
MAX_NAME_LINES = 12
_MAX_NAMES_IN_BRACES = 8


class UnusedParametersWarning(UserWarning):
    """Some parameters received no gradient, and the strategy changed how it runs DDP because of it."""


class UnusedParametersError(RuntimeError):
    """Some parameters received no gradient, and the strategy was told to raise then (``on_unused="raise"``).

    Raised on every rank in the same step, before the optimizer steps.

    Attributes:
        decision: which parameters, on how many ranks; the same on every rank.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(describe_error(decision))
        self.decision = decision

    def __reduce__(self) -> tuple[type[UnusedParametersError], tuple[Decision]]:
        # Launchers that spawn carry the error to the parent process.
        return type(self), (self.decision,)


def describe(decision: Decision) -> str:
    """The report of a decision, which for ON and FINISH is the text of the warning.

    Args:
        decision: what was decided.

    Returns:
        One line for WATCH. Otherwise: what happened, the parameters by the number of ranks that missed them, what it
        means, and what to do.
    """
    if not decision.unused:
        return (
            f"Every rank used all {decision.parameters} parameters ({_quantity(decision.elements)} elements) at step"
            f" {decision.step}; DDP runs with find_unused_parameters=False."
        )
    if decision.state is State.ON:
        now = "runs with find_unused_parameters=True"
        cost = "Each step now also walks the autograd graph."
        advice = 'If this is expected, strategy="ddp_find_unused_parameters_true" says so from the start.'
    else:
        obstacles = " and ".join(obstacle.value for obstacle in decision.obstacles)
        reason = f"find_unused_parameters=True cannot serve {obstacles}" if obstacles else 'fallback="finish" says so'
        now = f"finishes each step's reduction itself: {reason}"
        cost = "What a step misses is now reduced as zeros in its own backward."
        advice = "If this is expected, there is nothing to do."
    return "\n".join(
        (
            f"{_what_happened(decision)} and now {now}.",
            *_name_lines(decision),
            f"Nothing was lost: this step's gradients are complete on all ranks. {cost}",
            f"{advice} If not, these parameters do not reach the loss.",
        )
    )


def describe_error(decision: Decision) -> str:
    """The error of a decision that the user does not want to be taken."""
    return "\n".join(
        (
            f'{_what_happened(decision)}, which is an error under on_unused="raise".',
            *_name_lines(decision),
            "No optimizer has stepped on this step's gradients, on any rank: the weights are those of before the step.",
            "If these parameters should be trained, look for where they drop out of the loss: an output that nothing"
            " takes up, a variable that another of the same name overwrites, a branch that is not run.",
            'If not, freeze them (requires_grad=False) or write on_unused="fallback", which trains on with the right'
            " gradients.",
        )
    )


def _what_happened(decision: Decision) -> str:
    elements = sum(parameter.numel for parameter in decision.unused)
    return (
        f"DDP left {len(decision.unused)} of {decision.parameters} parameters ({_quantity(elements)} of"
        f" {_quantity(decision.elements)} elements) without a gradient at step {decision.step}"
    )


def describe_verdict(verdict: Verdict) -> str:
    """What rank zero prints at the end of a smoke run.

    Returns:
        What was used by whom, who sat out, what rules the flag out; then the line to write, why, and what the run
        cannot have shown.
    """
    elements = sum(parameter.numel for parameter in verdict.parameters)
    return "\n".join(
        (
            f"Smoke run: {_steps(verdict.steps)} on {_ranks(verdict.world_size)}; {len(verdict.parameters)} trainable"
            f" parameters ({_quantity(elements)} elements).",
            *_usage_lines(verdict),
            *_sit_out_lines(verdict),
            *(f"find_unused_parameters=True cannot serve {obstacle.value}." for obstacle in verdict.obstacles),
            f"Advice: Trainer(strategy={verdict.line})",
            *(f"  because {reason.value}{';' if more else '.'}" for reason, more in _with_more(verdict.reasons)),
            _what_it_cannot_show(verdict),
        )
    )


def _with_more(reasons: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """Each of them, and whether there are more to come."""
    for place, reason in enumerate(reasons, start=1):
        yield reason, place < len(reasons)


def _usage_lines(verdict: Verdict) -> list[str]:
    groups = [("used by every rank in every step:", verdict.used), ("used by no rank:", verdict.unused)]
    by_ranks: dict[tuple[int, ...], list[ParameterUsage]] = {}
    for parameter in verdict.partly_used:
        by_ranks.setdefault(parameter.used_in, []).append(parameter)
    groups[1:1] = [(_usage_label(verdict, used_in), tuple(some)) for used_in, some in by_ranks.items()]
    if verdict.frozen:
        groups.append(("frozen:", tuple(ParameterUsage(name, 0, ()) for name in verdict.frozen)))
    groups = [(label, parameters) for label, parameters in groups if parameters]
    width = max((len(label) for label, _ in groups), default=0)
    lines: list[tuple[str, int]] = []
    for label, parameters in groups:
        names = [UnusedParameter(parameter.name, parameter.numel, 0) for parameter in parameters]
        for position, (text, count) in enumerate(_fold_names(names)):
            lines.append((f"  {label if position == 0 else '':<{width}}  {text}", count))
    return _at_most(lines, "strategy.verdict")


def _usage_label(verdict: Verdict, used_in: tuple[int, ...]) -> str:
    users = [rank for rank, times in enumerate(used_in) if times]
    always = all(used_in[rank] == verdict.steps - verdict.sat_out[rank] for rank in users)
    by = "every rank" if len(users) == verdict.world_size else ranks_by_number(users)
    return f"used by {by}{'' if always else ', not in every step'}:"


def _sit_out_lines(verdict: Verdict) -> list[str]:
    lines = [
        f"Rank {rank} sat out {steps} of {_steps(verdict.steps)}, or a part of them."
        for rank, steps in enumerate(verdict.sat_out)
        if steps
    ]
    if len(lines) > MAX_NAME_LINES:
        lines = [*lines[: MAX_NAME_LINES - 1], f"So did {len(lines) - MAX_NAME_LINES + 1} more ranks."]
    return lines or ["No rank sat a step out."]


def _what_it_cannot_show(verdict: Verdict) -> str:
    seen = f"This is what {_steps(verdict.steps)} on {_ranks(verdict.world_size)} showed"
    if verdict.advice is Advice.ADAPTIVE:
        return f"{seen}. Nothing needs to be changed in what you have written."
    wrong = {
        Advice.DDP: "ends in an error, a hang or ranks that hold different weights once a rank leaves a parameter out",
        Advice.FLAG: "hangs or ends in an error once a rank has no loss, and walks the graph in every step",
        Advice.STATIC_GRAPH: "ends in an error, a hang or wrong gradients once a step uses other parameters",
    }
    return (
        f"{seen}; {verdict.line} {wrong[verdict.advice]}. If later steps, more ranks or unfrozen parameters may make a"
        ' difference, keep strategy="ddp_adaptive": it costs one all-reduce of one integer a step, which is not waited'
        " for."
    )


def _steps(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def _ranks(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def describe_sit_out(*, rank: int, step: int, times: int, reason: str = SIT_OUT_OF_A_FIT) -> str:
    """The warning of a rank that had nothing to contribute to a step."""
    return (
        f"Rank {rank} sat out step {step} ({times} time{'' if times == 1 else 's'} so far): {reason}."
        " It contributed zeros, so that the other ranks could take their"
        " step; the mean is still over all ranks, so the step is smaller. If you skip bad batches, there is nothing to"
        " do."
    )


def describe_rewraps(*, changes: int, steps: int, mean_ms: float) -> str:
    """The warning of a run whose set of trainable parameters keeps changing."""
    return (
        f"The set of trainable parameters has changed {changes} times in {steps} steps, and each time the module was"
        f" wrapped by DDP again, which took {mean_ms:.1f} ms on average. The numbers are right. If that is too slow,"
        " keep requires_grad as it is during training and leave parameters out of the optimizer's step instead."
    )


def describe_split(*, step: int, names: Sequence[str], trainable_by_rank: Sequence[frozenset[str]]) -> str:
    """The error of ranks that train different sets of parameters."""
    everywhere = frozenset.intersection(*trainable_by_rank)
    by_ranks: dict[tuple[int, ...], list[UnusedParameter]] = {}
    for name in names:
        ranks = tuple(rank for rank, trainable in enumerate(trainable_by_rank) if name in trainable)
        if ranks and name not in everywhere:
            by_ranks.setdefault(ranks, []).append(UnusedParameter(name, 0, 0))
    lines = [
        f"  only on rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}: {text}"
        for ranks, parameters in by_ranks.items()
        for text, _ in _fold_names(parameters)
    ]
    # The same set everywhere means that the ranks changed it in different steps.
    where = ["These are trainable", *lines] if lines else ["Some ranks changed it a step earlier than others."]
    return "\n".join(
        (
            f"The set of trainable parameters did not change in the same way on all ranks by step {step}, and DDP"
            " cannot reduce what only some ranks train: they would wait for each other for ever.",
            *where,
            "Set requires_grad on every rank in the same step; if it depends on data, decide on one rank and broadcast"
            " the decision (trainer.strategy.broadcast; in Fabric fabric.broadcast).",
        )
    )


def describe_added(*, names: Sequence[str]) -> str:
    """The error of a module that got new parameters while it was trained."""
    folded = ", ".join(text for text, _ in _fold_names([UnusedParameter(name, 0, 0) for name in names]))
    return (
        f"The module has parameters that it did not have when DDP wrapped it: {folded}. DDP would never reduce their"
        " gradients. Create them in configure_model() or __init__() and freeze them until they are needed"
        " (requires_grad may change at any time), or end this fit and start another; in Fabric, set the model up again."
    )


def _quantity(count: int) -> str:
    """A count as a person reads it: 512, 4.1 k, 22.0 M."""
    scaled, unit = float(count), ""
    for larger_unit in ("k", "M", "G", "T"):
        # 999.95 would round to 1000.0 of the smaller unit.
        if scaled < 999.95:
            break
        scaled, unit = scaled / 1000, larger_unit
    return f"{scaled:.1f} {unit}" if unit else str(count)


def _name_lines(decision: Decision) -> list[str]:
    by_ranks = sorted(decision.unused, key=lambda parameter: (-parameter.missed_by, parameter.ranks))
    groups = [
        (_rank_label(missed_by, ranks, decision.world_size), list(parameters))
        for (missed_by, ranks), parameters in groupby(by_ranks, key=attrgetter("missed_by", "ranks"))
    ]
    width = max(len(label) for label, _ in groups)
    lines: list[tuple[str, int]] = []
    for label, parameters in groups:
        for position, (names, count) in enumerate(_fold_names(parameters)):
            lines.append((f"  {label if position == 0 else '':<{width}}  {names}", count))
    return _at_most(lines, "strategy.decision.unused")


def _at_most(lines: Sequence[tuple[str, int]], where: str) -> list[str]:
    """The lines, or as many as there is room for and how many parameters there are besides."""
    if len(lines) <= MAX_NAME_LINES:
        return [line for line, _ in lines]
    shown = lines[: MAX_NAME_LINES - 1]
    rest = sum(count for _, count in lines[MAX_NAME_LINES - 1 :])
    return [*(line for line, _ in shown), f"  and {rest} more; {where} has all of them."]


def _rank_label(missed_by: int, ranks: Sequence[int], world_size: int) -> str:
    if missed_by == world_size:
        return "on every rank:"
    if not ranks:
        return f"on {missed_by} of {world_size} ranks:"
    return f"on {ranks_by_number(ranks)}:"


def ranks_by_number(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them: ``rank 3``, ``ranks 0..3,7``."""
    written = braces([str(rank) for rank in ranks])
    return f"rank {written}" if len(ranks) == 1 else f"ranks {written[1:-1]}"


class _Tree(dict[str, "_Tree"]):
    """The dotted names as a tree; a leaf is a parameter."""


def _fold_names(parameters: Sequence[UnusedParameter]) -> list[tuple[str, int]]:
    """Fold names that differ in one component only: ``a.{0,1}.{weight,bias}``, each with the number it stands for."""
    root = _Tree()
    for parameter in parameters:
        node = root
        for component in parameter.name.split("."):
            node = node.setdefault(component, _Tree())
    return [(text, count) for text, count in _fold(root)]


def _fold(node: _Tree) -> tuple[tuple[str, int], ...]:
    # Siblings with the same things below them are written once.
    siblings: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for component, child in node.items():
        siblings.setdefault(_fold(child), []).append(component)
    lines: list[tuple[str, int]] = []
    for below, components in siblings.items():
        written = braces(components)
        for text, count in below or (("", 1),):
            lines.append((f"{written}.{text}" if text else written, count * len(components)))
    return tuple(lines)


def braces(components: Sequence[str]) -> str:
    """Names that differ in one component, with that component's values in braces: ``{0..3,7}``."""
    if len(components) == 1:
        return components[0]
    written = list(_runs(components))
    if len(written) > _MAX_NAMES_IN_BRACES:
        hidden = len(written) - _MAX_NAMES_IN_BRACES + 1
        written = [*written[: _MAX_NAMES_IN_BRACES - 1], f"and {hidden} more"]
    return f"{{{','.join(written)}}}"


def _runs(components: Iterable[str]) -> Iterable[str]:
    """Consecutive numbers as ranges, where that is shorter: 0, 1, 2, 3 is ``0..3``."""
    positions: list[list[str]] = []
    for component in components:
        last = positions[-1][-1] if positions else ""
        if component.isdecimal() and last.isdecimal() and int(component) == int(last) + 1:
            positions[-1].append(component)
        else:
            positions.append([component])
    for run in positions:
        if len(run) > 2:
            yield f"{run[0]}..{run[-1]}"
        else:
            yield from run
