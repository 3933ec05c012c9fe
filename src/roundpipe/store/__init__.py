"""All layers in host memory: weights, gradients and optimizer copies, shared by devices and optimizer."""

from roundpipe.store.adopt import PinMode
from roundpipe.store.layout import Layout, TensorPlace
from roundpipe.store.master import HalvedMaster, OptimizerCopy
from roundpipe.store.records import BufferRecord, HostGradient, LayerRecord, ParameterRecord
from roundpipe.store.slot import LayerSlot
from roundpipe.store.store import LayerStore
from roundpipe.store.update import LayerUpdate, StepAbandoned

__all__ = [
    "BufferRecord",
    "HalvedMaster",
    "HostGradient",
    "LayerRecord",
    "LayerSlot",
    "LayerStore",
    "LayerUpdate",
    "Layout",
    "OptimizerCopy",
    "ParameterRecord",
    "PinMode",
    "StepAbandoned",
    "TensorPlace",
]
