"""The optimizer's copies of the trainable parameters.

Made on demand; read and written by the optimizer thread (and by callers while it is idle). Knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from roundpipe.store.host_buffer import HostBuffer
from roundpipe.store.layout import lay_out
from roundpipe.store.optimizer_copy import OptimizerCopy
from roundpipe.store.records import LayerRecord, ParameterRecord


class Masters:
    def __init__(self, layers: Sequence[LayerRecord], optim_dtype: torch.dtype | None) -> None:
        self._layers = layers
        self._optim_dtype = optim_dtype

    def of(self, record: ParameterRecord) -> OptimizerCopy:
        """The optimizer's copy of a parameter; the whole home layer gets its copies at once, in one flat buffer."""
        if record.master is None:
            at_home = [r for r in self._layers[record.home].trainable if r.home == record.home and r.master is None]
            self._create(at_home if record in at_home else [record])
        assert record.master is not None
        return record.master

    def wanted(self, record: ParameterRecord) -> bool:
        """Whether a gradient of this parameter would be the optimizer's."""
        return record.master is not None or record.param.requires_grad or record.gathered is not None

    def existing(self) -> Iterator[OptimizerCopy]:
        for layer in self._layers:
            for record in layer.parameters:
                if record.home == layer.layer_id and record.master is not None:
                    yield record.master

    def _create(self, records: Sequence[ParameterRecord]) -> None:
        layout = lay_out([record.weights for record in records])
        if self._optim_dtype is not None:
            layout = lay_out([record.weights for record in records], self._optim_dtype)
        flat = HostBuffer(layout.total_bytes, None)
        for record, view in zip(records, layout.views(flat.tensor), strict=True):
            with torch.no_grad():
                view.copy_(record.weights)
            record.master = OptimizerCopy(view)
            record.master.forget_touches()
