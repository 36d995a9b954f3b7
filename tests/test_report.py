"""The text a user reads, from decisions made by hand."""

from __future__ import annotations

import pytest

from adaptive_ddp import Decision, State, UnusedParameter
from adaptive_ddp.decision import decide
from adaptive_ddp.report import MAX_NAME_LINES, describe


def decision(*unused: tuple[str, int, int], world_size: int = 8, parameters: int = 148) -> Decision:
    return Decision(
        state=State.ON,
        step=1,
        world_size=world_size,
        parameters=parameters,
        elements=22_000_000,
        unused=tuple(UnusedParameter(*parameter) for parameter in unused),
    )


def test_the_warning_reads_as_a_person_would_write_it() -> None:
    layers = [f"model.layers.7.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
    text = describe(
        decision(
            ("model.pooler.dense.weight", 2_000_000, 8),
            ("model.pooler.dense.bias", 1_000, 8),
            *((name, 524_750, 3) for name in layers),
        )
    )
    assert text == (
        "DDP left 6 of 148 parameters (4.1 M of 22.0 M elements) without a gradient at step 1 and now runs with"
        " find_unused_parameters=True.\n"
        "  on every rank:    model.pooler.dense.{weight,bias}\n"
        "  on 3 of 8 ranks:  model.layers.7.{fc1,fc2}.{weight,bias}\n"
        "Nothing was lost: this step's gradients are complete on all ranks. Each step now also walks the autograd"
        " graph.\n"
        'If this is expected, strategy="ddp_find_unused_parameters_true" says so from the start. If not, these'
        " parameters do not reach the loss."
    )


def test_str_of_a_decision_is_its_report() -> None:
    made = decision(("head.weight", 10, 2))
    assert str(made) == describe(made)


def names(*written: str) -> list[str]:
    text = describe(decision(*((name, 1, 8) for name in written)))
    return [line.removeprefix("  on every rank:").strip() for line in text.splitlines()[1:-2]]


@pytest.mark.parametrize(
    ("parameters", "folded"),
    [
        (["weight"], ["weight"]),
        (["a.weight", "a.bias"], ["a.{weight,bias}"]),
        (["a.weight", "b.weight"], ["{a,b}.weight"]),
        (["a.weight", "a.bias", "b.weight"], ["a.{weight,bias}", "b.weight"]),
        ([f"layers.{n}.weight" for n in range(12)], ["layers.{0..11}.weight"]),
        ([f"layers.{n}.weight" for n in (0, 1, 2, 5)], ["layers.{0..2,5}.weight"]),
        ([f"layers.{n}.weight" for n in (3, 7)], ["layers.{3,7}.weight"]),
        (["a.0.w", "a.1.w", "a.2.w", "a.2.b"], ["a.{0,1}.w", "a.2.{w,b}"]),
        (
            [f"head_{chr(97 + n)}.w" for n in range(10)],
            [f"{{{','.join(f'head_{chr(97 + n)}' for n in range(7))},and 3 more}}.w"],
        ),
    ],
)
def test_names_are_folded(parameters: list[str], folded: list[str]) -> None:
    assert names(*parameters) == folded


def test_many_names_end_in_a_count() -> None:
    # Each module has parameters of its own names, so nothing folds.
    written = names(*(f"module{n}.p{n}" for n in range(40)))
    assert len(written) == MAX_NAME_LINES
    assert written[-1] == "and 29 more; strategy.decision.unused has all of them."


def test_the_report_of_a_clean_run() -> None:
    clean = decide(step=1, world_size=2, names=["a", "b"], numels=[999, 1], missed_by=[0, 0])
    assert clean.state is State.WATCH
    assert str(clean) == (
        "Every rank used all 2 parameters (1.0 k elements) at step 1; DDP runs with find_unused_parameters=False."
    )


def test_one_rank_of_one_is_every_rank() -> None:
    assert "on every rank:" in describe(decision(("w", 1, 1), world_size=1))


def test_a_decision_cannot_be_changed() -> None:
    made = decision(("w", 1, 1))
    with pytest.raises(AttributeError):
        made.step = 2  # type: ignore[misc]


def test_the_usage_map_makes_the_decision() -> None:
    made = decide(step=5, world_size=4, names=["a", "b", "c"], numels=[1, 2, 3], missed_by=[0, 4, 1])
    assert made.state is State.ON
    assert made.unused == (UnusedParameter("b", 2, 4), UnusedParameter("c", 3, 1))
    assert (made.parameters, made.elements, made.step) == (3, 6, 5)
