"""``on_unused="raise"``: an error on all ranks in the same step, before the optimizer steps."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from differential import CONTENDERS, Case, Tracer, across_ranks, batches_of_this_rank, make_trainer, run_case, train
from models import InMicroBatch, LateEverywhere, OnlyOnce, SomeRanks
from package import AdaptiveDDPStrategy, BoringModel, LightningCLI, seed_everything
from ranks import Ranks

from adaptive_ddp import UnusedParametersError
from adaptive_ddp.decision import State, decide

RAISE = {"on_unused": "raise"}


def fit(case: Case) -> tuple[UnusedParametersError, int, list[str]]:
    """Train until the error: the error, how often the optimizer stepped, and where the weights are not what they were.

    They are compared with those of a reference that stopped before that step.
    """
    seed_everything(7, verbose=False)
    model, tracer = case.model(), Tracer()
    strategy = AdaptiveDDPStrategy(**RAISE)
    with pytest.raises(UnusedParametersError) as raised:
        make_trainer(strategy, [tracer], **case.trainer).fit(model, batches_of_this_rank(case))
    assert strategy.decision is raised.value.decision
    steps = len(tracer.trace.gradients)
    seed_everything(7, verbose=False)
    reference = case.model()
    if steps:
        make_trainer(CONTENDERS["flag"](), max_steps=steps, **case.trainer).fit(reference, batches_of_this_rank(case))
    expected = reference.state_dict()
    unequal = [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
    return raised.value, steps, unequal


USAGES = {
    "all ranks, first step": (models.never_last, 1, {2}),
    "all ranks, later": (LateEverywhere(3), 4, {2}),
    "rank 0, first step": (SomeRanks(0, 0), 1, {1}),
    "rank 1, later": (SomeRanks(2, 1), 3, {1}),
    "rank 0, last step": (OnlyOnce(4, 0), 5, {1}),
    "each rank another": (models.OwnBranch(), 1, {1}),
}


@pytest.mark.parametrize("usage", USAGES)
def test_all_ranks_raise_in_the_step_before_the_optimizer(ranks: Ranks, usage: str) -> None:
    its_usage, step, missed_by = USAGES[usage]
    for error, steps, unequal in ranks(2).run(fit, Case(partial(models.Branches, its_usage))):
        assert error.decision.step == step
        assert steps == step - 1
        assert unequal == []
        assert {parameter.missed_by for parameter in error.decision.unused} == missed_by


def test_three_ranks(ranks: Ranks) -> None:
    for error, steps, _ in ranks(3).run(fit, Case(partial(models.Branches, SomeRanks(2, 1)))):
        assert (error.decision.step, steps) == (3, 2)


@pytest.mark.parametrize("model", [models.CheckpointedBranches, models.SparseBranches])
def test_graphs_that_the_flag_cannot_serve(ranks: Ranks, model: Any) -> None:
    # There is no reference with the flag for these; both ranks stop at the same step.
    for error, steps in ranks(2).run(steps_until_the_error, Case(partial(model, SomeRanks(2, 1)))):
        assert (error.decision.step, steps) == (3, 2)


def steps_until_the_error(case: Case) -> tuple[UnusedParametersError, int]:
    tracer = Tracer()
    strategy = AdaptiveDDPStrategy(**RAISE, **case.strategy, **case.ours)
    with pytest.raises(UnusedParametersError) as raised:
        make_trainer(strategy, [tracer], **case.trainer).fit(case.model(), batches_of_this_rank(case))
    return raised.value, len(tracer.trace.gradients)


def test_the_error_names_the_ranks(ranks: Ranks) -> None:
    for error, _ in ranks(3).run(steps_until_the_error, Case(partial(models.Branches, SomeRanks(2, 0, 2)))):
        assert {(parameter.missed_by, parameter.ranks) for parameter in error.decision.unused} == {(2, (0, 2))}
        assert "  on ranks 0,2:  branches.1.{0,2}.{weight,bias}" in str(error)


class CountsHooks(models.Branches):
    hooks = 0

    def on_after_backward(self) -> None:
        self.hooks += 1


def hooks_and_steps(usage: models.Usage) -> tuple[int, int]:
    model = CountsHooks(usage)
    _, steps = steps_until_the_error(Case(lambda: model))
    return model.hooks, steps


def test_the_error_comes_before_the_hook_after_the_backward(ranks: Ranks) -> None:
    assert ranks(2).run(hooks_and_steps, SomeRanks(2, 1)) == [(2, 2), (2, 2)]


CHOICES = {
    "a smoke run": {"trainer": {"fast_dev_run": 3}},
    "finishing in place": {"ours": {"fallback": "finish"}},
    "buckets that are the gradients": {"strategy": {"gradient_as_bucket_view": True}},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_whatever_else_was_chosen(ranks: Ranks, choice: str) -> None:
    for error, steps in ranks(2).run(
        steps_until_the_error, Case(partial(models.Branches, SomeRanks(1, 1)), **CHOICES[choice])
    ):
        assert (error.decision.step, steps) == (2, 1)


def test_one_device(ranks: Ranks) -> None:
    ((error, steps),) = ranks(1).run(steps_until_the_error, Case(partial(models.Branches, LateEverywhere(2))))
    assert (error.decision.step, steps) == (3, 2)


def error_of_a_gan(toggle: bool) -> tuple[set[str], list[str], int]:
    tracer, model = Tracer(), models.Gan(toggle)
    seed_everything(7, verbose=False)
    with pytest.raises(UnusedParametersError) as raised:
        make_trainer(AdaptiveDDPStrategy(**RAISE), [tracer]).fit(model, batches_of_this_rank(Case(lambda: model)))
    tracer.trace.weights.append(model.state_dict())
    tracer.trace.gradients.append(dict.fromkeys(name for name, _ in model.named_parameters()))
    modules = {parameter.name.split(".")[0] for parameter in raised.value.decision.unused}
    return modules, across_ranks(tracer.trace), len(tracer.trace.gradients) - 1


@pytest.mark.parametrize(("toggle", "missing", "steps"), [(False, "generator", 1), (True, "discriminator", 0)])
def test_manual_optimization(ranks: Ranks, toggle: bool, missing: str, steps: int) -> None:
    # The step of an optimizer before it in the same training_step has been taken, on all ranks alike.
    for modules, differences, stepped in ranks(2).run(error_of_a_gan, toggle):
        assert (modules, differences, stepped) == ({missing}, [], steps)


@pytest.mark.parametrize("usage", [OnlyOnce(2, 0), OnlyOnce(2, 0, 1)], ids=models.usage_id)
def test_what_is_missing_in_the_step_in_which_something_else_is_frozen(ranks: Ranks, usage: models.Usage) -> None:
    case = Case(partial(models.Freezes, usage, {2: {2: False}}))
    for error, steps in ranks(2).run(steps_until_the_error, case):
        assert (error.decision.step, steps) == (3, 2)
        assert all(parameter.name.startswith("branches.1.") for parameter in error.decision.unused)


def test_a_rank_that_sits_out_is_not_among_those_that_missed_something(ranks: Ranks) -> None:
    case = Case(partial(models.SitsOut, SomeRanks(0, 0), (0,), (1,), "None"))
    for error, _ in ranks(2).run(steps_until_the_error, case):
        assert {parameter.ranks for parameter in error.decision.unused} == {(0,)}
        assert all(parameter.name.startswith("branches.1.") for parameter in error.decision.unused)


def test_a_window_counts_as_a_whole(ranks: Ranks) -> None:
    case = Case(partial(models.Branches, InMicroBatch(0, 2, 0, 1)), batches=6, ours=RAISE)
    case.trainer = {"accumulate_grad_batches": 2}
    for outcome in ranks(2).run(run_case, case):
        assert outcome.differences == []
    case = Case(partial(models.Branches, InMicroBatch(0, 2, 1)), batches=6, trainer=case.trainer)
    for error, steps in ranks(2).run(steps_until_the_error, case):
        assert (error.decision.step, steps) == (1, 0)


@pytest.mark.parametrize(
    "model",
    [
        partial(models.Branches, models.all_used),
        partial(models.SitsOut, models.all_used, (0, 2), (1,), "None"),
        partial(models.SitsOut, models.all_used, (1,), (0, 1), "unreached"),
        partial(models.Freezes, models.all_used, {2: {1: False}, 4: {1: True}}),
        partial(models.Freezes, models.all_used, {2: {1: False}}, at_first={2: False}),
    ],
    ids=["clean", "one sits out", "both sit out", "freezing", "freezing more"],
)
def test_what_is_no_error(ranks: Ranks, model: Any) -> None:
    for outcome in ranks(2).run(run_case, Case(model, 6, ours=RAISE, references=("oracle",))):
        assert outcome.differences == []
        assert outcome.final_decision.state is State.WATCH


def an_error_and_another_fit() -> list[str]:
    steps_until_the_error(Case(partial(models.Branches, SomeRanks(2, 1))))
    case = Case(partial(models.Branches, models.never_last))
    return [str(train(case, contender)[0].weights) for contender in ("adaptive", "flag")]


def test_the_ranks_can_train_after_the_error(ranks: Ranks) -> None:
    for ours, flag in ranks(2).run(an_error_and_another_fit):
        assert ours == flag


def test_the_error_says_what_happened_and_what_to_do() -> None:
    decision = decide(step=3, world_size=2, names=["net.weight", "head.weight"], numels=[8, 4], missed_by=[0, 1])
    assert str(UnusedParametersError(decision)).splitlines() == [
        "DDP left 1 of 2 parameters (4 of 12 elements) without a gradient at step 3, which is an error under"
        ' on_unused="raise".',
        "  on 1 of 2 ranks:  head.weight",
        "No optimizer has stepped on this step's gradients, on any rank: the weights are those of before the step.",
        "If these parameters should be trained, look for where they drop out of the loss: an output that nothing takes"
        " up, a variable that another of the same name overwrites, a branch that is not run.",
        'If not, freeze them (requires_grad=False) or write on_unused="fallback", which trains on with the right'
        " gradients.",
    ]


def test_the_error_survives_pickling() -> None:
    decision = decide(step=3, world_size=2, names=["a"], numels=[8], missed_by=[1])
    copy = pickle.loads(pickle.dumps(UnusedParametersError(decision)))
    assert copy.decision == decision


@pytest.mark.parametrize("argument", ["on_unused", "fallback"])
def test_what_there_is_not_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}='error'.*Write {argument}="):
        AdaptiveDDPStrategy(**{argument: "error"})


def test_its_name_is_needed() -> None:
    parameters = inspect.signature(AdaptiveDDPStrategy.__init__).parameters
    assert parameters["on_unused"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.filterwarnings("ignore")
def test_the_choice_survives_pickling_and_the_command_line(tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(AdaptiveDDPStrategy(**RAISE)))._on_unused == "raise"
    arguments = [
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.accelerator=cpu",
        "--trainer.strategy=adaptive_ddp.AdaptiveDDPStrategy",
        "--trainer.strategy.on_unused",
    ]
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=[*arguments, "raise"])
    assert cli.trainer.strategy._on_unused == "raise"
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, run=False, save_config_callback=None, args=[*arguments, "error"])


def test_the_processes_end(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "programs/strict.py"],
        env=environment,
        cwd=tests,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
        # Nothing of the session is left, the other rank included.
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "on rank 1:  branches.1.{0,2}.{weight,bias}" in output
