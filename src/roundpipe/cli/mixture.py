"""Which rows of several sources are trained: rows split off for evaluation, and sources mixed by weight.

Knows numbers of rows, never what is in them. All choices depend on the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundpipe.errors import ConfigError


def split_off(sizes: Sequence[int], share: float, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Divide the rows of all sources at random into those to train and those to evaluate.

    share: of the rows to evaluate, below 1; or their number. Returns the rows of each source, in their order.
    """
    import numpy

    total = sum(sizes)
    count = round(share * total) if share < 1 else int(share)
    if not 0 < count < total:
        raise ConfigError(
            f"--eval-split {share:g} leaves {total - count} rows to train and {count} to evaluate, of {total}; both "
            "need at least one."
        )
    chosen = set(numpy.random.default_rng(seed).permutation(total)[:count].tolist())
    trained: list[list[int]] = []
    evaluated: list[list[int]] = []
    begin = 0
    for size in sizes:
        trained.append([row for row in range(size) if begin + row not in chosen])
        evaluated.append([row for row in range(size) if begin + row in chosen])
        begin += size
    return trained, evaluated


def rows_by_weight(sizes: Sequence[int], weights: Sequence[float], seed: int) -> list[list[int]]:
    """The rows of each source in one pass over the data, so that the sources have shares in proportion to the weights.

    No row is left out: the source that is largest for its weight is there once, and rows of the others are repeated as
    often as their weight asks for. Where that is no whole number, the rows that come once more are drawn at random.
    """
    import numpy

    whole = sum(weights)
    total = max(size * whole / weight for size, weight in zip(sizes, weights, strict=True))
    rng = numpy.random.default_rng(seed)
    chosen = []
    for size, weight in zip(sizes, weights, strict=True):
        count = max(size, math.floor(total * weight / whole + 0.5))
        times, more = divmod(count, size)
        drawn = sorted(rng.permutation(size)[:more].tolist())
        chosen.append([*(list(range(size)) * times), *drawn])
    return chosen
