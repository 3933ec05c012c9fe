"""Records the losses and tokens per second of one training run, and shows a progress bar if tqdm is installed.

Knows numbers and time, not models.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from torch import Tensor

UNTIMED_STEPS = 2  # the first steps allocate and plan, so the rate leaves them out


class Meter:
    """Losses and tokens per second of one training run. A context manager; its exit ends the measured time."""

    def __init__(self, name: str, num_step: int) -> None:
        self.name = name
        self.losses: list[float] = []
        self._num_untimed = min(UNTIMED_STEPS, num_step - 1)
        self._timed_tokens = 0
        self._start_s = self._end_s = time.perf_counter()
        self._bar = open_bar(name, num_step)

    def record(self, loss: Tensor, num_token: int) -> None:
        """Add one step: its loss and its number of tokens."""
        self.losses.append(float(loss))
        self._end_s = time.perf_counter()
        if len(self.losses) > self._num_untimed:
            self._timed_tokens += num_token
        elif len(self.losses) == self._num_untimed:
            self._start_s = self._end_s
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {self.losses[-1]:.3f}, {self.tokens_per_s():,.0f} tokens/s", refresh=False)
            self._bar.update()

    def tokens_per_s(self) -> float:
        return self._timed_tokens / max(self._end_s - self._start_s, 1e-9)

    def final_loss(self, num_last: int = 10) -> float:
        """Mean of the last `num_last` losses, because a single batch is noisy."""
        last = self.losses[-num_last:]
        return sum(last) / len(last)

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_s = time.perf_counter()
        if self._bar is not None:
            self._bar.close()


def open_bar(name: str, num_step: int) -> Any:
    """A tqdm progress bar; None if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=num_step, desc=f"{name:16}", unit="step", mininterval=0.5, ncols=110)
