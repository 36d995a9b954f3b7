"""The strategy in hand-written Fabric loops: equal, bit for bit and on every rank, to the flag and to an oracle."""

from __future__ import annotations

import copy
import gc
import inspect
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import fabric_loops as loops
import models
import pytest
import torch
import torch.distributed as dist
from differential import batches_of_this_rank
from fabric_rig import CONTENDERS, FabricCase, FabricOutcome, make_fabric, run_case
from lightning_fabric.strategies import STRATEGY_REGISTRY
from models import WIDTH, InMicroBatch, LateEverywhere, OnlyOnce, SomeRanks
from package import Fabric, FabricDDPStrategy, FabricMixedPrecision
from ranks import Ranks
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from adaptive_ddp import UnusedParametersError
from adaptive_ddp.decision import Decision, Obstacle, State


def run_cases(cases: list[FabricCase]) -> list[FabricOutcome]:
    return [run_case(case) for case in cases]


def run(ranks: Ranks, world_size: int, *cases: FabricCase) -> list[list[FabricOutcome]]:
    """Per case the outcomes of the ranks; in one go, since a case takes less time than its way to the ranks."""
    by_rank = ranks(world_size).run(run_cases, list(cases))
    for rank, outcomes in enumerate(by_rank):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert outcome.differences == [], f"rank {rank}: {case}"
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def branches(usage: models.Usage, world_size: int = 2, model: Any = models.Branches, **kwargs: Any) -> FabricCase:
    # As in test_strategy.py: more than two ranks need sums that are exact.
    exact = {"dyadic": True} if world_size == 4 else {}
    return FabricCase(
        partial(model, usage, **exact), dyadic=world_size == 4, tolerance=1e-6 if world_size == 3 else None, **kwargs
    )


def usages(last: int) -> list[models.Usage]:
    return [
        models.never_last,
        models.never_first,
        LateEverywhere(1),
        LateEverywhere(3),
        SomeRanks(0, 0),
        SomeRanks(0, last),
        SomeRanks(2, 0),
        SomeRanks(2, last),
        OnlyOnce(2, last),
        models.OwnBranch(),
    ]


def few_usages(last: int) -> list[models.Usage]:
    return [models.never_first, LateEverywhere(3), SomeRanks(0, last), SomeRanks(2, 0)]


FOUR_USAGES = [models.never_last, LateEverywhere(2), SomeRanks(0, 1), SomeRanks(3, 0)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_and_gradients_equal_both_references(ranks: Ranks, world_size: int) -> None:
    last = world_size - 1
    cases = [branches(usage, world_size) for usage in (usages(last) if world_size in (2, 4) else few_usages(last))]
    for outcomes in run(ranks, world_size, *cases):
        assert len({str(outcome.decisions) for outcome in outcomes}) == 1
        assert outcomes[0].decisions[0].state is State.ON
        assert [len(outcome.warnings) for outcome in outcomes] == [1] + [0] * (world_size - 1)
        assert outcomes[0].flags[-1] is True


def test_a_clean_model_ends_with_the_bits_of_plain_ddp(ranks: Ranks) -> None:
    for outcome in run(ranks, 2, branches(models.all_used, references=("plain",)))[0]:
        assert outcome.flags == [False] * 5
        assert outcome.warnings == outcome.others == []
        assert outcome.decisions[0].state is State.WATCH


def test_the_flag_is_on_when_the_optimizer_steps(ranks: Ranks) -> None:
    everywhere, some = run(ranks, 2, branches(LateEverywhere(3)), branches(SomeRanks(2, 1)))
    assert everywhere[0].flags == some[0].flags == [False, False, False, True, True]
    assert everywhere[0].decisions[0].step == 4
    assert some[0].decisions[0].step == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_finish_as_the_fallback_leaves_the_flag_off(ranks: Ranks, accumulate: int) -> None:
    finish = {"ours": {"fallback": "finish"}, "batches": 8, "accumulate": accumulate}
    for outcomes in run(ranks, 2, *(branches(usage, **finish) for usage in FOUR_USAGES)):
        for outcome in outcomes:
            assert outcome.decisions[0].state is State.FINISH
            assert not any(outcome.flags)


def raising_loop(first: int, missing_ranks: tuple[int, ...]) -> tuple[str, list[tuple[int, ...]], bool]:
    """What the error says, by which ranks the parameters were missed, and whether the weights are the step's before."""
    fabric = make_fabric(CONTENDERS["adaptive"](on_unused="raise"))
    module = models.Branches(SomeRanks(first, *missing_ranks))
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("training_step")
    for index, batch in enumerate(batches_of_this_rank(FabricCase(models.Branches))):
        before = [parameter.clone() for parameter in module.parameters()]
        try:
            fabric.backward(model.training_step(batch, index))
        except UnusedParametersError as error:
            missed_by = [parameter.ranks for parameter in error.decision.unused]
            return f"step {error.decision.step}", missed_by, all(map(torch.equal, before, module.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return "no error", [], False


@pytest.mark.parametrize("missing_ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("first", [0, 3])
def test_it_raises_on_all_ranks_in_the_same_step(ranks: Ranks, first: int, missing_ranks: tuple[int, ...]) -> None:
    said = ranks(2).run(raising_loop, first, missing_ranks)
    assert said == [(f"step {first + 1}", [missing_ranks] * len(said[0][1]), True)] * 2
    assert said[0][1]


def test_a_miss_in_the_last_step_is_served_and_not_reported(ranks: Ranks) -> None:
    # No hook of Fabric's says that a loop is over.
    for outcome in run(ranks, 2, branches(OnlyOnce(4, 1)))[0]:
        assert outcome.decisions[0].unused == ()


def test_accumulation(ranks: Ranks) -> None:
    usages = [*FOUR_USAGES, InMicroBatch(0, 2, 0), InMicroBatch(1, 2, 0, 1), OnlyOnce(3, 1), OnlyOnce(4, 0)]
    cases = [
        branches(usage, batches=8, accumulate=2, strategy=strategy, references=("flag",) if strategy else ("oracle",))
        for usage in usages
        for strategy in ({}, {"gradient_as_bucket_view": True})
    ]
    run(ranks, 2, *cases)


def scaled() -> dict[str, Any]:
    return {"plugins": [FabricMixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=8.0))]}


VARIANTS: dict[str, dict[str, Any]] = {
    "bucket view": {"strategy": {"gradient_as_bucket_view": True}},
    "tiny buckets": {"strategy": {"bucket_cap_mb": 0.0001}},
    "batched copies": {"strategy": {"batched_grad_copy": True}},
    "bf16-mixed": {"fabric": partial(dict, precision="bf16-mixed")},
    "16-mixed": {"fabric": scaled},
    "clipping": {"clip": 0.01},
}
if "batched_grad_copy" not in signature(DistributedDataParallel).parameters:
    # Not there yet in the oldest torch.
    del VARIANTS["batched copies"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_fabric_and_of_ddp(ranks: Ranks, variant: str) -> None:
    run(ranks, 2, *(branches(usage, references=("flag",), **VARIANTS[variant]) for usage in FOUR_USAGES))


@pytest.mark.parametrize("model", [models.SharedBranches, models.IgnoringBranches])
def test_kinds_of_models(ranks: Ranks, model: Any) -> None:
    references = ("flag",) if model is models.IgnoringBranches else ("flag", "oracle")
    ranks_are_equal = model is not models.IgnoringBranches
    cases = [branches(u, model=model, references=references, ranks_are_equal=ranks_are_equal) for u in FOUR_USAGES]
    run(ranks, 2, *cases)


def test_more_than_a_hundred_missing_parameters(ranks: Ranks) -> None:
    run(ranks, 2, branches(SomeRanks(1, 1), model=models.WideBranches, batches=3, references=("flag",)))


def test_batch_norm(ranks: Ranks) -> None:
    run(ranks, 2, *(branches(u, model=models.BatchNormBranches, references=("flag",)) for u in FOUR_USAGES))


@pytest.mark.parametrize(
    ("model", "obstacle"),
    [
        (models.CheckpointedBranches, Obstacle.REENTRANT),
        (loops.Hidden, Obstacle.REENTRANT),
        (models.SparseBranches, Obstacle.SPARSE),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_that_the_flag_cannot_serve(ranks: Ranks, model: Any, obstacle: Obstacle, accumulate: int) -> None:
    cases = [branches(u, model=model, references=("oracle",), batches=6, accumulate=accumulate) for u in FOUR_USAGES]
    for outcomes in run(ranks, 2, *cases):
        for outcome in outcomes:
            if outcome.decisions[0].unused:
                assert outcome.decisions[0].state is State.FINISH
                assert outcome.decisions[0].obstacles == (obstacle,)
            assert not any(outcome.flags)
    assert outcomes[0].decisions[0].unused or accumulate == 2


def test_a_changing_set_of_trainable_parameters(ranks: Ranks) -> None:
    schedules = [
        {2: {1: False}},
        {1: {1: False}, 3: {1: True}},
        {2: {2: True}},
        {1: {2: True}, 3: {0: False, 2: False}, 4: {0: True}},
    ]
    cases = [
        branches(usage, model=partial(models.Freezes, schedule=schedule, at_first={2: False}), references=("oracle",))
        for schedule in schedules
        for usage in (models.all_used, SomeRanks(0, 1))
    ]
    for outcomes in run(ranks, 2, *cases):
        assert all(not outcome.others for outcome in outcomes)


@pytest.mark.parametrize("how", ["None", "unreached", "constant"])
def test_a_rank_without_a_loss_contributes_zeros(ranks: Ranks, how: str) -> None:
    cases = [
        branches(
            usage,
            model=partial(models.SitsOut, batches=batches, ranks=out, how=how),
            references=("oracle",),
            accumulate=accumulate,
        )
        for usage in (models.all_used, models.never_last)
        for batches, out in (((0, 3), (1,)), ((2,), (0,)))
        for accumulate in (1, 2)
    ]
    found = run(ranks, 2, *cases)
    assert "Rank 1 sat out step 1 (1 time so far): its loss reaches none" in found[0][1].others[0]
    assert found[0][0].decisions[0].state is State.WATCH
    assert found[4][0].decisions[0].state is State.ON


def test_all_ranks_without_a_loss(ranks: Ranks) -> None:
    model = partial(models.SitsOut, batches=(0, 2), ranks=(0, 1), how="None")
    run(ranks, 2, branches(models.all_used, model=model, references=("oracle",)))


def test_forward_and_backward_in_a_closure(ranks: Ranks) -> None:
    cases = [
        branches(u, model=models.LbfgsBranches, loop=loops.closure_loop) for u in (SomeRanks(0, 1), FOUR_USAGES[1])
    ]
    run(ranks, 2, *cases)


def test_losses_that_are_not_made_of_the_models_output(ranks: Ranks) -> None:
    usages = (models.all_used, SomeRanks(0, 1))
    run(ranks, 2, *(branches(u, loop=loops.regularizer_loop, references=("oracle",)) for u in usages))


# -- several models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(("fresh", "accumulate"), [(False, 1), (True, 1), (False, 2)])
def test_a_gan_of_two_models(ranks: Ranks, freeze: bool, fresh: bool, accumulate: int) -> None:
    loop = partial(loops.gan_loop, freeze=freeze, fresh=fresh, accumulate=accumulate)
    # The forward of the frozen one leaves its wrapper waiting for a backward, which the flag meets in the next window
    # ("ready only once").
    references = ("oracle",) if freeze and accumulate > 1 else ("flag", "oracle")
    cases = [FabricCase(u, loop=loop, batches=4, references=references) for u in (models.all_used, *FOUR_USAGES)]
    clean, *found = run(ranks, 2, *cases)
    assert [decision.state for decision in clean[0].decisions] == [State.WATCH, State.WATCH]
    assert clean[0].others == clean[0].warnings == []
    if accumulate == 1:
        assert "Model 1 of 2 that were set up (Pieces): DDP left" in "".join(found[0][0].warnings)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_miss_parts_of_different_models_in_one_backward(
    ranks: Ranks, order: tuple[int, int], world_size: int
) -> None:
    loop = partial(loops.chain_loop, order=order)
    case = FabricCase(dict, loop=loop, references=("oracle",), tolerance=None if world_size == 2 else 1e-6)
    for outcome in run(ranks, world_size, case)[0]:
        assert [decision.state for decision in outcome.decisions] == [State.ON, State.ON]


def test_a_loss_that_reaches_only_some_of_the_models(ranks: Ranks) -> None:
    cases = [FabricCase(usage, loop=loops.heads_loop, references=("oracle",)) for usage in loops.HEADS]
    found = run(ranks, 2, *cases)
    # On no rank: the second head has no part in any backward, and nothing is decided about it.
    assert found[1][0].decisions[2] is None
    assert [decision.state for decision in found[0][0].decisions] == [State.WATCH] * 3


# -- the wrapper stays the object that it is ---------------------------------------------------------------------------


def counting_hook(state, bucket):  # type: ignore[no-untyped-def]
    state.append(bucket.index())
    return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def rebuilt_inside() -> dict[str, Any]:
    """One backward that misses something, and what is left of the wrapper then."""
    strategy = CONTENDERS["adaptive"](gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    fabric = make_fabric(strategy)
    module = loops.Pieces()
    module._ddp_params_and_buffers_to_ignore = ["first.bias"]
    model = fabric.setup(module)
    ddp, buckets, forwards = model._forward_module, [], []
    ddp.register_comm_hook(buckets, counting_hook)
    ddp.register_forward_hook(lambda *args: forwards.append(1))
    keys = list(model.state_dict())
    old = weakref.ref(ddp.reducer)
    batch = torch.ones(2, WIDTH)
    fabric.backward(model(batch, (0, 1)).sum())
    gc.collect()
    found = {"old reducer": old(), "flag": ddp.find_unused_parameters, "before": len(buckets)}
    fabric.backward(model(batch, (0, 1)).sum())
    found["hook goes on"] = len(buckets) > found["before"]
    found["unused"] = [parameter.name for parameter in strategy.decision.unused]
    found["forwards"] = len(forwards)
    found["same"] = model._forward_module is ddp and list(model.state_dict()) == keys
    found["views"] = {module.first.weight.grad._base is not None, module.pieces[0].weight.grad._base is not None}
    found["size"] = len(set(buckets))
    return found


def test_the_reducer_is_rebuilt_inside_the_same_wrapper(ranks: Ranks) -> None:
    for found in ranks(2).run(rebuilt_inside):
        assert found["old reducer"] is None
        assert found["flag"] is True
        assert found["hook goes on"]
        assert found["unused"] == ["pieces.2.weight", "pieces.2.bias"]
        assert found["forwards"] == 2
        assert found["same"]
        assert found["views"] == {True}
        assert found["size"] > 1


def power_sgd() -> tuple[int, str, bool]:
    strategy = CONTENDERS["adaptive"]()
    fabric = make_fabric(strategy)
    model = fabric.setup(loops.Pieces())
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model._forward_module.register_comm_hook(state, powerSGD_hook)
    for used in ((0, 1, 2), (0, 1, 2), (0, 1), (0, 1)):
        fabric.backward(model(torch.ones(2, WIDTH), used).sum())
    return state.iter, strategy.decision.state.value, model._forward_module.find_unused_parameters


def test_power_sgd_is_finished_in_place(ranks: Ranks) -> None:
    assert len({found[1:] for found in ranks(2).run(power_sgd)} | {("finish", False)}) == 1


# -- what else Fabric's users do ---------------------------------------------------------------------------------------


class Methods(nn.Module):
    """A model with a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = loops.Pieces()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.pieces(batch, (0, 1, 2))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.pieces(batch, (0, 1)).square().mean()


def uses(contender: str, folder: str) -> dict[str, Any]:
    """What a user does with a model beside training it, under one strategy."""
    torch.manual_seed(0)
    fabric = make_fabric(CONTENDERS[contender]())
    module = Methods()
    model, optimizer = fabric.setup(module, loops.sgd(module))
    model.mark_forward_method("loss")
    batch = torch.ones(2, WIDTH) + dist.get_rank()
    found: dict[str, Any] = {}
    for _ in range(2):
        fabric.backward(model.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
    for name, copied in (("model", copy.deepcopy(model)), ("module", copy.deepcopy(model.module))):
        found[f"a copy of the {name}"] = copied(batch).detach()
    path = f"{folder}/{contender}.pt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    fabric.barrier()
    found["keys"] = list(torch.load(path)["model"])
    with torch.no_grad():
        module.pieces.first.weight.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    fabric.backward(model.loss(batch))
    found["gradient"] = module.pieces.first.weight.grad.clone()
    # The same module once more, in a wrapper of its own, and one that is compiled.
    again = fabric.setup_module(module, move_to_device=False)
    module.zero_grad()
    again.mark_forward_method("loss")
    fabric.backward(again.loss(batch))
    found["again"] = module.pieces.first.weight.grad.clone()
    compiled_module = loops.Pieces()
    compiled = fabric.setup(torch.compile(compiled_module, backend="eager"))
    for used in ((0, 1), (0, 2), (0, 1)):
        compiled_module.zero_grad()
        fabric.backward(compiled(batch, used).sum())
        fabric.backward(compiled(batch, used).square().sum())
        found[f"compiled {used}"] = [p.grad for p in compiled_module.parameters()]
    return found


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def different_uses(folder: str) -> list[str]:
    ours, theirs = uses("adaptive", folder), uses("flag", folder)
    return [name for name in ours if not same(ours[name], theirs[name])]


def test_what_else_is_done_with_a_model_is_as_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(different_uses, str(tmp_path)) == [[], []]


def raw_backward() -> str:
    fabric = make_fabric(CONTENDERS["adaptive"]())
    model = fabric.setup(loops.Pieces())
    with pytest.raises(RuntimeError) as refused:
        model(torch.ones(2, WIDTH), (0, 1, 2)).sum().backward()
    return str(refused.value)


def test_a_raw_backward_is_refused_by_fabric(ranks: Ranks) -> None:
    for text in ranks(2).run(raw_backward):
        assert "call `fabric.backward(loss)` instead of `loss.backward()`" in text


def skipped_backward() -> tuple[str, float]:
    """Rank 1 runs no backward at all."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    fabric = make_fabric(CONTENDERS["adaptive"](process_group=group))
    model = fabric.setup(loops.Pieces())
    loss = model(torch.ones(2, WIDTH), (0, 1, 2)).sum()
    began = time.monotonic()
    error = ""
    if dist.get_rank() == 0:
        try:
            fabric.backward(loss)
        except RuntimeError as raised:
            error = str(raised)
    return error, time.monotonic() - began


def test_a_rank_that_skips_the_backward_ends_the_others_with_an_error_at_the_timeout(ranks: Ranks) -> None:
    (error, seconds), _ = ranks(2).run(skipped_backward)
    assert "imed out" in error or "timeout" in error or "closed" in error
    assert seconds < 5
    # The group is of no use any more.
    ranks(2).kill()


def added_parameter() -> str:
    fabric = make_fabric(CONTENDERS["adaptive"]())
    module = loops.Pieces()
    model = fabric.setup(module)
    module.added = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(RuntimeError) as refused:
        fabric.backward(model(torch.ones(2, WIDTH), (0, 1, 2)).sum())
    return str(refused.value)


def test_an_added_parameter_is_named(ranks: Ranks) -> None:
    for text in ranks(2).run(added_parameter):
        assert "added.{weight,bias}" in text
        assert "in Fabric, set the model up again" in text


def groups(own: bool) -> tuple[int, list[list[int]], bool]:
    """Two models in one backward, of which each rank misses part of another."""
    options = {"process_group": dist.new_group()} if own else {}
    fabric = make_fabric(CONTENDERS["adaptive"](**options))
    first, second = (fabric.setup(loops.Pieces()) for _ in range(2))
    used = ((0, 1), (0, 1, 2)) if fabric.global_rank else ((0, 1, 2), (0, 1))
    fabric.backward(second(first(torch.ones(2, WIDTH), used[0]), used[1]).sum())
    made = [model._forward_module.process_group for model in (first, second)]
    names = {group.group_name for group in made}
    first_is_given = made[0] is options.get("process_group", dist.group.WORLD)
    return len(names), [dist.get_process_group_ranks(group) for group in made], first_is_given


@pytest.mark.parametrize("own", [False, True])
def test_each_model_has_a_process_group_of_its_own(ranks: Ranks, own: bool) -> None:
    assert ranks(2).run(groups, own) == [(2, [[0, 1], [0, 1]], True)] * 2


def dropped_model() -> tuple[bool, Decision | None]:
    strategy = CONTENDERS["adaptive"]()
    fabric = make_fabric(strategy)
    model = fabric.setup(loops.Pieces())
    wrapper = weakref.ref(model._forward_module)
    del model
    gc.collect()
    other = fabric.setup(loops.Pieces())
    fabric.backward(other(torch.ones(2, WIDTH), (0, 1, 2)).sum())
    return wrapper() is None, strategy.decisions[0]


def test_a_model_that_is_let_go_of_goes(ranks: Ranks) -> None:
    assert ranks(2).run(dropped_model) == [(True, None)] * 2


def under_a_package(package: str) -> tuple[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    ours = "adaptive_ddp.lightning.fabric" if package == "lightning.fabric" else "adaptive_ddp.fabric"
    strategy: Any = import_module(ours).AdaptiveDDPStrategy
    fabric = import_module(package).Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy())
    fabric.launch()
    module = loops.Pieces()
    model, optimizer = fabric.setup(module, loops.sgd(module))
    for used in ((0, 1, 2), (0, 1) if fabric.global_rank else (0, 2), (0, 1)):
        fabric.backward(model(torch.ones(2, WIDTH) + fabric.global_rank, used).square().mean())
        optimizer.step()
    return str(fabric.strategy.decision), list(module.parameters())


def under_both_packages() -> tuple[bool, str]:
    decision, weights = under_a_package("lightning.fabric")
    other_decision, other_weights = under_a_package("lightning_fabric")
    return decision == other_decision and all(map(torch.equal, weights, other_weights)), decision


def test_both_packages_in_one_process(ranks: Ranks) -> None:
    pytest.importorskip("lightning.fabric")
    for equal, decision in ranks(2).run(under_both_packages):
        assert equal
        assert "on 1 of 2 ranks:  pieces.{1,2}.{weight,bias}" in decision


def nested_output() -> bool:
    """A model that returns its tensors in containers, and its parameters in no graph that can be looked at."""

    @dataclass
    class Output:
        hidden: Any
        losses: dict[str, list[torch.Tensor]]

    fabric = make_fabric(CONTENDERS["adaptive"]())
    module = loops.Hidden(models.never_last)
    module.forward = lambda batch: Output(None, {"loss": [module.training_step(batch, 0)]})
    model = fabric.setup(module)
    loss = model(torch.ones(2, WIDTH)).losses["loss"][0]
    fabric.backward(loss)
    return fabric.strategy.decision is not None


def test_a_loss_that_is_taken_out_of_containers(ranks: Ranks) -> None:
    assert ranks(2).run(nested_output) == [True] * 2


# -- the public surface ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["lightning_fabric", "lightning.fabric"])
def test_fabric_takes_the_names(package: str) -> None:
    fabric_class: Any = Fabric
    strategy_class: Any = CONTENDERS["adaptive"]
    if package == "lightning.fabric":
        fabric_class = pytest.importorskip("lightning.fabric").Fabric
        from adaptive_ddp.lightning.fabric import AdaptiveDDPStrategy as strategy_class
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for suffix, start_method in methods.items():
        strategy = fabric_class(strategy=f"ddp_adaptive{suffix}", accelerator="cpu", devices=2).strategy
        assert type(strategy) is strategy_class
        assert strategy._start_method == start_method
    assert "ddp_adaptive" in STRATEGY_REGISTRY


@pytest.mark.parametrize("argument", ["find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"])
def test_what_the_strategy_decides_itself_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}=True.*Leave the argument out"):
        CONTENDERS["adaptive"](**{argument: True})


def test_it_takes_ddps_arguments() -> None:
    parameters = [
        name for name in inspect.signature(FabricDDPStrategy.__init__).parameters if name not in ("self", "kwargs")
    ]
    strategy = CONTENDERS["adaptive"](**dict.fromkeys(parameters), bucket_cap_mb=3)
    assert isinstance(strategy, FabricDDPStrategy)
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 3}
    assert strategy.decision is None
    assert strategy.decisions == ()
