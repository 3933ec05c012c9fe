"""Lines between machines, which are threads of one process here."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed as dist

from roundpipe.distributed.line import Line
from roundpipe.errors import MachineError
from roundpipe.monitor import Monitor

SIZE = 3


@pytest.mark.parametrize("timeouts_s", [(2.0, 2.0), (1.7, 2.0), (2.0, 1.7)], ids=["together", "0 first", "2 first"])
def test_the_machine_at_the_end_of_a_chain_of_waits_is_the_lost_one(timeouts_s: tuple[float, float]) -> None:
    """Machine 1 is silent. Machine 0 waits for it, and machine 2 for machine 0; either wait may time out first."""
    store = dist.HashStore()
    limits = {0: timeouts_s[0], 2: timeouts_s[1]}
    waits_for = {0: 1, 2: 0}

    def joined(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, SIZE, datetime.timedelta(seconds=30))

    def lost_rank(rank: int, group: dist.ProcessGroup) -> int | None:
        timeout = datetime.timedelta(seconds=limits[rank])
        line = Line(group, store, f"line-{rank}", Monitor(), timeout)
        into = {waits_for[rank]: torch.empty(1)}
        with pytest.raises(MachineError) as caught:
            line.call(lambda: line.trade({}, into, "a message"), "a message")
        line.close("the test ends")
        return caught.value.rank

    with ThreadPoolExecutor(SIZE) as threads:
        groups = list(threads.map(joined, range(SIZE)))
        found = [threads.submit(lost_rank, rank, groups[rank]) for rank in waits_for]
        assert [future.result() for future in found] == [1, 1]
