"""The ranges of machines: every element belongs to one, and no block to two."""

from __future__ import annotations

import pytest

from roundpipe.store import Share
from roundpipe.store.values import BLOCK

COUNTS = (0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 7 * BLOCK - 5, 64 * BLOCK + 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", COUNTS)
def test_ranges_are_whole_blocks_of_nearly_equal_number(count: int, size: int) -> None:
    shares = [Share(rank, size) for rank in range(size)]
    ranges = [share.range_of(count) for share in shares]
    assert [at for each in ranges for at in (each.start, each.stop)][1:-1:2] == [each.start for each in ranges[1:]]
    assert (ranges[0].start, ranges[-1].stop) == (0, count)
    assert all(each.start % BLOCK == 0 or each.start == count for each in ranges)
    assert [share.count_of(count) for share in shares] == [each.stop - each.start for each in ranges]
    blocks = [-(-share.count_of(count) // BLOCK) for share in shares]
    assert max(blocks) - min(blocks) <= 1
    assert all(share.range_of(count, rank) == ranges[rank] for share in shares for rank in range(size))


def test_a_range_does_not_depend_on_other_parameters() -> None:
    assert Share(1, 2).range_of(5 * BLOCK) == slice(2 * BLOCK, 5 * BLOCK)
    assert Share(0, 2).range_of(BLOCK) == slice(0, 0), "the last machine has a parameter of one block"
