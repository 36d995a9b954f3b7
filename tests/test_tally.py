"""What the ranks exchange, on real groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from adaptive_ddp.tally import Count, Exchange


def exchange() -> Exchange:
    return Exchange(dist.group.WORLD, torch.device("cpu"))


def tally(missing: tuple[int, ...], sat_out: tuple[int, ...]) -> Count:
    rank = dist.get_rank()
    posted = exchange().post(missing=rank in missing, sat_out=rank in sat_out)
    assert posted.read() == posted.read()
    return posted.read()


@pytest.mark.parametrize(
    ("missing", "sat_out"), [((), ()), ((0,), ()), ((0, 1, 2), ()), ((1,), (0, 2)), ((), (0, 1, 2))]
)
def test_a_tally_counts_both_kinds_of_ranks(ranks: Ranks, missing: tuple[int, ...], sat_out: tuple[int, ...]) -> None:
    assert ranks(3).run(tally, missing, sat_out) == [Count(len(missing), len(sat_out))] * 3


def two_tallies_read_backwards() -> list[Count]:
    channel, rank = exchange(), dist.get_rank()
    first = channel.post(missing=rank == 0, sat_out=False)
    second = channel.post(missing=True, sat_out=False)
    return [second.read(), first.read()] if rank else [first.read(), second.read()]


def test_ranks_may_read_tallies_in_different_order(ranks: Ranks) -> None:
    first, second = ranks(2).run(two_tallies_read_backwards)
    assert first == second[::-1] == [Count(1, 0), Count(2, 0)]


def usage_map() -> list[int]:
    rank = dist.get_rank()
    return exchange().sum_usage([] if rank == 0 else [1, rank], size=4)


def test_the_usage_map_counts_the_ranks_that_missed_each_parameter(ranks: Ranks) -> None:
    assert ranks(3).run(usage_map) == [[0, 2, 1, 0]] * 3
