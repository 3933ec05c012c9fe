"""Presets: how models of known classes become plain `nn.Sequential`s of the same layers and parameters.

Asked by api when a model is wrapped; users may register their own. Knows nothing of the runtime.
"""

from roundpipe.models.registry import Convert, find_preset, register

__all__ = ["Convert", "find_preset", "register"]
