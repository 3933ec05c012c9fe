"""Models with any attention implementation are split: calibration runs on the host without GPU kernels."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from small_models import labelled, plain_loss, small, train_call, wrapped

from helpers_parity import assert_same, assert_same_grads
from roundpipe import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError

transformers = pytest.importorskip("transformers")
GPU_ONLY = "gpu_only"


@pytest.fixture
def _gpu_only_attention() -> Iterator[None]:
    """An implementation that fails on the host: anywhere but on the threads of devices."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("this kernel needs a GPU")
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)

    transformers.AttentionInterface.register(GPU_ONLY, attention)
    transformers.AttentionMaskInterface.register(GPU_ONLY, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        type(interface)._global_mapping.pop(GPU_ONLY)


@pytest.mark.usefixtures("_gpu_only_attention")
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_attention_kernels_for_gpus_run_on_devices_only(model_type: str) -> None:
    plain, batch = small(model_type), labelled(model_type)
    ours = copy.deepcopy(plain)
    ours.config._attn_implementation = GPU_ONLY
    with pytest.raises(RuntimeError, match="needs a GPU"):
        ours(**batch)
    with wrapped(ours, 2) as model:
        assert ours.config._attn_implementation == GPU_ONLY
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
        assert train_call(model, batch, whole_batch_loss=True).isfinite()  # counts on the host
        assert ours.config._attn_implementation == GPU_ONLY


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_torchs_own_implementations_stay_during_calibration(implementation: str) -> None:
    plain, batch = small("llama"), labelled("llama")
    plain.config._attn_implementation = implementation
    with wrapped(copy.deepcopy(plain), 2) as model:
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)


@pytest.mark.parametrize("use_sequential_preset", [None, True, False])
def test_attention_that_compiles_itself_is_refused(use_sequential_preset: bool | None) -> None:
    model = small("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match=r"flex_attention compiles itself.*'sdpa', 'eager' or 'flash_attention_2'"):
        wrap_model_to_roundpipe(model, use_sequential_preset, devices=["cpu"])
    assert model.config._attn_implementation == "flex_attention"
