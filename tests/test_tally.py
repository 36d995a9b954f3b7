"""What the ranks exchange, on real groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from adaptive_ddp.tally import Count, Exchange, PostedTally


def exchange() -> Exchange:
    return Exchange(dist.group.WORLD, torch.device("cpu"))


def tally(waiting: tuple[int, ...], differing: tuple[int, ...], changed: tuple[int, ...]) -> Count:
    rank = dist.get_rank()
    posted = exchange().post(waiting=rank in waiting, differing=rank in differing, changed=rank in changed)
    assert posted.read() == posted.read()
    return posted.read()


@pytest.mark.parametrize("counted", [((), (), ()), ((0, 1, 2), (1,), ()), ((1,), (1,), (0, 2)), ((), (), (0, 1, 2))])
def test_a_tally_holds_three_counts(ranks: Ranks, counted: tuple[tuple[int, ...], ...]) -> None:
    assert ranks(3).run(tally, *counted) == [Count(*map(len, counted))] * 3


def test_the_counts_of_a_million_ranks_do_not_mix() -> None:
    most = (1 << 20) - 1
    part = 1 | 1 << 20 | 1 << 40
    assert part * most < 1 << 63
    assert PostedTally(torch.tensor([part * most]), None).read() == Count(most, most, most)


def two_tallies_read_backwards() -> list[Count]:
    channel, rank = exchange(), dist.get_rank()
    first = channel.post(waiting=True, differing=rank == 0, changed=False)
    second = channel.post(waiting=True, differing=True, changed=False)
    return [second.read(), first.read()] if rank else [first.read(), second.read()]


def test_ranks_may_read_tallies_in_different_order(ranks: Ranks) -> None:
    first, second = ranks(2).run(two_tallies_read_backwards)
    assert first == second[::-1] == [Count(2, 1, 0), Count(2, 2, 0)]


def usage_map() -> list[int]:
    rank = dist.get_rank()
    return exchange().count([] if rank == 0 else [1, rank], size=4)


def test_the_usage_map_counts_the_ranks_that_missed_each_parameter(ranks: Ranks) -> None:
    assert ranks(3).run(usage_map) == [[0, 2, 1, 0]] * 3
