"""Every layer in host memory: the one state devices and optimizer share."""

from roundpipe.store.layer_slot import LayerSlot
from roundpipe.store.layer_store import LayerStore, PinMode
from roundpipe.store.layer_update import LayerUpdate, StepAbandoned
from roundpipe.store.layout import Layout, TensorPlace
from roundpipe.store.optimizer_copy import LowGradient, OptimizerCopy
from roundpipe.store.records import BufferRecord, LayerRecord, ParameterRecord

__all__ = [
    "BufferRecord",
    "LayerRecord",
    "LayerSlot",
    "LayerStore",
    "LayerUpdate",
    "Layout",
    "LowGradient",
    "OptimizerCopy",
    "ParameterRecord",
    "PinMode",
    "StepAbandoned",
    "TensorPlace",
]
