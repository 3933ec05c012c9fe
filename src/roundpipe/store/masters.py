"""The optimizer's copies of the trainable parameters.

Made on demand; read and written by the optimizer thread (and by callers while it is idle). Knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from roundpipe.store.optimizer_copy import CopyHome, OptimizerCopy
from roundpipe.store.records import LayerRecord, ParameterRecord

_LOW_PRECISIONS = (torch.bfloat16, torch.float16)


class Masters:
    def __init__(
        self, layers: Sequence[LayerRecord], optim_dtype: torch.dtype | None, home: Callable[[], CopyHome | None]
    ) -> None:
        self._layers = layers
        self.optim_dtype = optim_dtype
        self._home = home
        self._may_lose_updates = optim_dtype is None and any(
            record.weights.dtype in _LOW_PRECISIONS for layer in layers for record in layer.parameters
        )

    def rearrange(self, layers: Sequence[LayerRecord]) -> None:
        self._layers = layers

    def of(self, record: ParameterRecord) -> OptimizerCopy:
        """The optimizer's copy of a parameter, made when it is first asked for."""
        if record.master is None:
            newest = record.weights
            record.master = OptimizerCopy.of_weight(newest, self.optim_dtype or newest.dtype)
            record.master.home = self._home
        return record.master

    def has_own_precision(self, record: ParameterRecord) -> bool:
        """Whether the optimizer's copy has another dtype than the parameter."""
        return self.optim_dtype is not None and self.optim_dtype is not record.weights.dtype

    def wanted(self, record: ParameterRecord) -> bool:
        """Whether a gradient of this parameter would be the optimizer's."""
        return record.master is not None or record.param.requires_grad or record.gathered is not None

    def losing_updates(self) -> list[ParameterRecord]:
        """Trainable parameters that an optimizer updates in low precision although the user did not choose that."""
        if not self._may_lose_updates:
            return []
        trained = {record.name: record for layer in self._layers for record in layer.trainable}
        return [record for record in trained.values() if record.weights.dtype in _LOW_PRECISIONS]

    def training_begins(self) -> None:
        """Tell whoever waits for it, once."""
        for master in self.existing():
            told, master.when_training = master.when_training, None
            if told is not None:
                told()

    @property
    def exist(self) -> bool:
        """Whether any copy was asked for so far."""
        return next(self.existing(), None) is not None

    def existing(self) -> Iterator[OptimizerCopy]:
        for layer in self._layers:
            for record in layer.parameters:
                if record.home == layer.layer_id and record.master is not None:
                    yield record.master
