"""Which labels a model's loss is the mean over: found by asking the model, not by knowing it.

Used by the splitter for `whole_batch_loss`. Microbatches with different numbers of labels must not be averaged as if
they had the same; a model that takes `num_items_in_batch` divides by that instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.models.calibration import fresh, private_copy
from roundpipe.models.trial import succeeds
from roundpipe.models.without_dropout import WithoutDropout

CountTargets = Callable[[torch.Tensor], int]
_IGNORED = -100
_CLOSE = 1e-3


def count_all(labels: torch.Tensor) -> int:
    return int((labels != _IGNORED).sum())


def count_shifted(labels: torch.Tensor) -> int:
    """Each position predicts the label of the next one: the first of a row is predicted by none."""
    return int((labels[..., 1:] != _IGNORED).sum())


def counting_rule(model: nn.Module, kwargs: Mapping[str, Any]) -> CountTargets:
    """The rule by which a loss with `num_items_in_batch` is the loss without it. `kwargs`: a small call with labels."""
    copy, _ = private_copy(model)
    given = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
    given["labels"] = given["labels"].clamp(min=0)  # where none is ignored, the rules count differently
    mean = total = float("nan")

    def is_computed() -> bool:
        nonlocal mean, total
        mean = float(copy(**fresh(given)).loss)
        total = float(copy(**fresh(given), num_items_in_batch=1).loss)
        return True

    with torch.no_grad(), torch.random.fork_rng(devices=()), WithoutDropout():
        succeeds("its loss follows num_items_in_batch", is_computed)
    labels: torch.Tensor = given["labels"]
    for rule in (count_shifted, count_all):
        count = rule(labels)
        if count > 1 and abs(total - mean * count) <= _CLOSE * abs(total):
            return rule
    raise ConfigError(
        f"whole_batch_loss: the loss of {type(model).__name__} does not follow num_items_in_batch (mean {mean:.6g}, "
        f"sum {total:.6g} over {count_all(labels)} labels); weigh the microbatches in your own loss_fn instead."
    )
