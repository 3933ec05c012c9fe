"""Every layer in host memory: the one state devices and optimizer share."""

from roundpipe.store.layout import Layout, TensorPlace
from roundpipe.store.master import LowGradient, OptimizerCopy
from roundpipe.store.records import BufferRecord, LayerRecord, ParameterRecord
from roundpipe.store.slot import LayerSlot
from roundpipe.store.store import LayerStore, PinMode
from roundpipe.store.update import LayerUpdate, StepAbandoned

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
