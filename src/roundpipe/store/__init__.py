"""All layers in host memory: weights, gradients and masters, shared by devices and optimizer."""

from roundpipe.store.host_memory import Layout, TensorPlace
from roundpipe.store.master import OptimizerCopy
from roundpipe.store.records import BufferRecord, HostGradient, LayerRecord, ParameterRecord
from roundpipe.store.store import LayerStore
from roundpipe.store.training_memory import PinMode
from roundpipe.store.update import LayerUpdate, StepAbandoned
from roundpipe.store.values import HalvedMaster, Share
from roundpipe.store.weights import LayerSlot

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
    "Share",
    "StepAbandoned",
    "TensorPlace",
]
