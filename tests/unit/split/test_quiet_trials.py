"""What a model warns of in trial runs, whose values are made up, is not shown; what it warns of in calls is."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import torch
from transformers import LlamaForCausalLM

from helpers_tiny_hf import VOCAB_SIZE, tiny_model
from roundpipe import wrap_model_to_roundpipe


class Warner(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stack = {frame.name for frame in traceback.extract_stack()}
        warnings.warn("of a trial" if stack & {"calibrate", "verify"} else "of a call", stacklevel=1)
        return super().forward(*args, **kwargs)


def test_trials_do_not_warn() -> None:
    plain = tiny_model("llama")
    plain.__class__ = Warner
    ids = torch.arange(12).reshape(2, 6) % VOCAB_SIZE
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = wrap_model_to_roundpipe(plain, devices="cpu")
        model.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        model.close()
    assert {str(each.message) for each in found} == {"of a call"}
