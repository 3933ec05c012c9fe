"""Models from folders of safetensors, one tensor at a time: packed, or at full precision without a second copy."""

from roundpipe.loading.loader import empty_model, fill, load, local_folder, quantised_parameters
from roundpipe.loading.quantised import open_folder, quantised_as
from roundpipe.loading.weight_folder import INDEX_FILE, Conversion, WeightFolder, conversions, require_fit, tensors_of

__all__ = [
    "INDEX_FILE",
    "Conversion",
    "WeightFolder",
    "conversions",
    "empty_model",
    "fill",
    "load",
    "local_folder",
    "open_folder",
    "quantised_as",
    "quantised_parameters",
    "require_fit",
    "tensors_of",
]
