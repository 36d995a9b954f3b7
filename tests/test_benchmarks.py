"""The benchmarks run and compare what is equal. How fast anything is, no test asks."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
import torch
from benchmarks import compare, fallback, own_work, traffic
from benchmarks.contenders import COMPARISONS, GROUPS, Contender
from benchmarks.cuda import become_only_rank_of_a_node, count_synchronisations
from benchmarks.driver import use_one_thread
from benchmarks.results import bootstrap, evaluate, table
from benchmarks.shapes import NONE, SHAPES, Shape, Stack, Unused
from benchmarks.timing import Job, Timed, balanced_orders, run_job
from pytorch_lightning.strategies import DDPStrategy
from ranks import RankGroup, Ranks

UNUSED = Unused(0.1, "late", "same")
QUICK = Job("62", UNUSED, ("on", "finish", "others"), repeats=1, steps=3, warm_up=3)


def test_the_quick_run_has_every_ratio_and_finds_equal_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--quick", "--steps", "4", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    results = json.loads((tmp_path / "compare.json").read_text())["results"]
    rows = [row for result in results for row in result["rows"]]
    assert [row["comparison"]["contender"] for row in rows] == [c.contender for c in COMPARISONS]
    for row in rows:
        assert 0 < row["wall"]["low"] <= row["wall"]["median"] <= row["wall"]["high"]
        assert 0 < row["cpu"]["low"] <= row["cpu"]["median"] <= row["cpu"]["high"]
    assert [result["parameters"] for result in results] == [62, 62]
    assert [result["unused_parameters"] for result in results] == [[0, 0], [6, 6]]
    assert len(re.findall(r"^\| [a-z ]+ / [a-z]+ \|", (tmp_path / "compare.md").read_text(), re.MULTILINE)) == len(rows)
    merged = tmp_path / "merged"
    assert compare.main(["--merge", str(tmp_path / "compare.json"), "--output", str(merged)]) == 0
    assert (merged / "compare.md").read_text() == (tmp_path / "compare.md").read_text()
    if find_spec("matplotlib"):
        assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_whole_trainers_step_in_turn_and_end_with_equal_weights(ranks: Ranks) -> None:
    job = replace(QUICK, through_trainer=True, repeats=2, steps=6)
    result = evaluate(job, [ranks(2).run(run_job, job, repeat) for repeat in range(job.repeats)])
    assert not result.unequal
    assert {len(row.wall_by_repeat) for row in result.rows} == {2}
    assert {len(steps) for parts in result.repeats for part in parts for steps in part.wall.values()} == {3}


@pytest.mark.parametrize("kind", ["different", "some", "changing"])
def test_contenders_end_with_equal_weights_where_ranks_differ(ranks: Ranks, kind: str) -> None:
    job = replace(QUICK, unused=replace(UNUSED, ranks=kind))
    assert not evaluate(job, [ranks(2).run(run_job, job, 0)]).unequal


def test_a_contender_that_trains_otherwise_is_found(ranks: Ranks) -> None:
    job = replace(QUICK, groups=("on",))
    unequal = evaluate(job, [ranks(2).run(_run_with_a_stray, job)]).unequal
    assert any("stray: blocks.0.0.weight differs from flag" in text for text in unequal)
    assert any("stray: ranks differ" in text for text in unequal)


class _NoReduction(DDPStrategy):
    """Every rank for itself."""

    def configure_ddp(self) -> None:
        pass


def _run_with_a_stray(job: Job) -> Timed:
    kept = GROUPS["on"]
    GROUPS["on"] = (kept[0], Contender("flag again", _NoReduction, "some unused"))
    try:
        timed = run_job(job, 0)
    finally:
        GROUPS["on"] = kept
    return replace(timed, unequal=[text.replace("flag again", "stray") for text in timed.unequal])


def test_models_without_some_blocks_start_with_the_same_weights() -> None:
    full, floor = Stack(SHAPES["62"]), Stack(SHAPES["62"], absent=UNUSED.everywhere(SHAPES["62"]))
    weights = full.state_dict()
    assert len(floor.state_dict()) < len(weights)
    assert all(torch.equal(weights[name], value) for name, value in floor.state_dict().items())


@pytest.mark.parametrize(("name", "parameters"), [("62", 62), ("300", 300), ("1200", 1200)])
def test_the_narrow_shapes_have_the_number_of_parameters_in_their_name(name: str, parameters: int) -> None:
    assert len([*Stack(SHAPES[name]).parameters()]) == parameters


def test_who_leaves_out_what() -> None:
    shape = Shape(10, torch.nn.Identity, torch.nn.Identity, torch.nn.Identity, ())
    late, early = Unused(0.4, "late", "same"), Unused(0.4, "early", "different")
    assert [late.left_out(shape, rank, 2, 0) for rank in (0, 1)] == [frozenset({6, 7, 8, 9})] * 2
    assert [early.left_out(shape, rank, 2, 0) for rank in (0, 1)] == [frozenset({0, 2}), frozenset({1, 3})]
    some, changing = replace(late, ranks="some"), replace(late, ranks="changing")
    assert [some.left_out(shape, rank, 2, 0) for rank in (0, 1)] == [frozenset({6, 7, 8, 9}), NONE]
    assert len({changing.left_out(shape, 0, 2, step) for step in range(20)}) > 2
    assert (late.everywhere(shape), early.everywhere(shape)) == (frozenset({6, 7, 8, 9}), NONE)


def test_in_the_order_of_steps_everybody_has_every_place_equally_often() -> None:
    orders = [*islice(balanced_orders("abc", random.Random(0)), 12)]
    assert all(Counter(order[place] for order in orders) == dict.fromkeys("abc", 4) for place in range(3))
    assert len(set(map(tuple, orders))) > 3


def test_the_interval_holds_the_median_and_narrows_with_more_steps() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist()
    few, many = bootstrap(values[:50]), bootstrap(values)
    assert few.low < few.median < few.high
    assert many.high - many.low < few.high - few.low


def test_own_work_is_told_for_each_number_of_parameters(ranks: Ranks) -> None:
    (row,) = ranks(1).run(own_work.measure_own_work, 5, 5)
    assert row.bar_us == 40.5
    assert any("strategy.py:backward" in line for line in row.profile)
    assert "| 5 |" in own_work.table([row])


def test_a_fallback_is_timed_from_its_first_step_on(ranks: Ranks) -> None:
    timed = ranks(2).run(fallback.measure_fallbacks, 2, "same", 1)
    lengths = {len(row) for part in timed for row in (*part.ours, *part.flag)}
    assert lengths == {fallback.STEPS_OF_FALLBACK + fallback.STEPS_AFTER}
    assert "| later |" in fallback.table([fallback.evaluate("later", timed)])


@pytest.mark.parametrize("kind", ["same", "some"])
def test_what_ranks_send_does_not_depend_on_how_many_they_are(ranks: Ranks, kind: str) -> None:
    strategy = next(iter(traffic.STRATEGIES))
    sent = {(strategy, kind, size): ranks(size).run(traffic.record, strategy, kind) for size in (2, 3)}
    assert not traffic.depends_on_world_size(sent)
    steps = sent[strategy, kind, 2][0].by_step
    assert steps[: traffic.CLEAN_STEPS] == [[8]] * traffic.CLEAN_STEPS
    assert max(map(max, steps)) == 4 * 300
    assert "| 16,384 | 8 | 4 | 125 | 39,736 |" in traffic.table(sent)


def test_the_checks_for_a_gpu_run_on_a_cpu_as_far_as_they_can(ranks: Ranks) -> None:
    assert ranks(1).run(_count_on_the_cpu) == [{}]


def test_ranks_that_share_a_device_are_nodes_of_their_own() -> None:
    group = RankGroup(2)
    try:
        group.run(become_only_rank_of_a_node, "gloo")
        job = replace(QUICK, groups=("on",))
        assert not evaluate(job, [group.run(run_job, job, 0)]).unequal
    finally:
        group.kill()


def _count_on_the_cpu() -> dict[str, float]:
    use_one_thread()
    return count_synchronisations(GROUPS["clean"][2], "cpu")


def test_without_a_gpu_the_checks_for_one_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert compare.main(["--device", "cuda"]) == 0
    assert "nothing was run" in capsys.readouterr().out


def test_only_what_is_asked_for_is_run(ranks: Ranks) -> None:
    job = replace(QUICK, unused=None, groups=("clean",), only=("watch",))
    text = table(evaluate(job, [ranks(2).run(run_job, job, 0)]).summary)
    assert "| watch / plain |" in text
    assert "plain again" not in text
