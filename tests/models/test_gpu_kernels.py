"""Models with kernels that run on GPUs alone: the host runs their plain code, devices run the kernels."""

from __future__ import annotations

import copy
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import assert_close_grads, labelled, lora, plain_loss, small, train_call, wrapped
from torch import Tensor, nn

from helpers_liger import liger
from helpers_parity import assert_same, microbatches
from roundpipe import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError

transformers = pytest.importorskip("transformers")
assert liger  # a fixture
KERNELS = {"rope", "norm", "mlp"}
Make = Callable[[Any, nn.Module], Any]


def patched_model(liger: Any, plain: nn.Module) -> Any:
    model = copy.deepcopy(plain)
    liger.apply_liger_kernel_to_llama(model=model)
    return model


def patched_adapter(liger: Any, plain: nn.Module) -> Any:
    model = copy.deepcopy(plain)
    liger.apply_liger_kernel_to_llama(model=model.get_base_model())
    return model


def patched_classes(liger: Any, plain: Any) -> Any:
    liger.apply_liger_kernel_to_llama()
    model = transformers.LlamaForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    assert type(model.model.norm).__name__ == "LigerRMSNorm"
    return model.train()


@pytest.mark.parametrize(
    ("make", "base", "options", "kernels"),
    [
        (patched_model, small, {}, KERNELS),
        (patched_classes, small, {}, KERNELS),
        (patched_adapter, lambda kind: lora(small(kind), "q_proj", "v_proj"), {}, KERNELS),
        (lambda liger, plain: copy.deepcopy(plain), small, {"liger_kernels": True}, KERNELS),
        (lambda liger, plain: copy.deepcopy(plain), small, {"liger_kernels": {"rope": False}}, {"norm", "mlp"}),
    ],
    ids=["a patched model", "patched classes", "a patched model with an adapter", "liger_kernels=True", "some kernels"],
)
def test_kernels_of_liger_run_on_devices(
    liger: Any, make: Make, base: Any, options: Any, kernels: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    plain, batch = base("llama"), labelled("llama")
    expected = plain_loss(plain, batch)  # before anything is patched
    with torch.no_grad():
        logits = plain(**batch).logits
    ours = make(liger, plain)
    if not options:
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            ours(**batch)
    with caplog.at_level(logging.INFO), wrapped(ours, 2, **options) as model:
        liger.CALLS.clear()
        torch.testing.assert_close(train_call(model, batch), expected, rtol=1e-5, atol=1e-6)
        assert_close_grads(model.original_model, plain, 1e-5)
        assert set(liger.CALLS) == kernels
        assert train_call(model, batch, whole_batch_loss=True).isfinite()  # counts on the host
        with torch.no_grad():
            found = model(**batch, roundpipe_run_config=microbatches(2)).logits
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    replaced = "the forward that liger_kernel gave LlamaForCausalLM is replaced by the plain one" in caplog.text
    assert replaced is not bool(options)


def test_patches_of_the_user_stay_and_those_of_the_wrapper_go_with_it(liger: Any) -> None:
    patched = patched_model(liger, small("llama"))
    wrapped(patched, 1).close()
    assert patched.model.norm.forward.__func__ is liger.LigerRMSNorm.forward
    plain = small("llama")
    wrapped(plain, 1, liger_kernels=True).close()
    assert "forward" not in vars(plain.model.norm)


def on_gpus_alone(x: Tensor) -> Tensor:
    if threading.current_thread() is threading.main_thread():
        raise RuntimeError("0 active drivers ([]). There should only be one.")
    return x.sigmoid() * x


on_gpus_alone.__module__ = "fast_kernels.ops"


def test_another_package_that_has_replaced_a_forward_is_met_the_same_way() -> None:
    plain, batch = small("llama"), labelled("llama")
    expected = plain_loss(plain, batch)
    ours = copy.deepcopy(plain)
    space: dict[str, Any] = {"__name__": "fast_kernels.ops", "fast": on_gpus_alone}
    exec("def forward(self, x):\n    return self.down_proj(fast(self.gate_proj(x)) * self.up_proj(x))", space)
    for layer in ours.model.layers:
        layer.mlp.forward = types.MethodType(space["forward"], layer.mlp)
    with pytest.raises(RuntimeError, match="active drivers"):
        ours(**batch)
    with wrapped(ours, 2) as model:
        torch.testing.assert_close(train_call(model, batch), expected, rtol=1e-5, atol=1e-6)
        assert_close_grads(model.original_model, plain, 1e-5)


class GpuNorm(nn.Module):
    """Has no code that the host can run."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor) -> Any:
        return self.plain(on_gpus_alone(x))


def test_a_module_without_plain_code_is_named_with_what_to_do() -> None:
    model = small("llama")
    model.model.layers[1].input_layernorm = GpuNorm(model.model.layers[1].input_layernorm)
    with pytest.raises(
        ConfigError,
        match=r"model\.layers\.1\.input_layernorm \(GpuNorm\) computes with code of .* that runs on GPUs alone, and "
        r"RoundPipe runs the model once on the host .*0 active drivers.*Load the model without these kernels",
    ):
        wrap_model_to_roundpipe(model, devices=["cpu"])


def test_other_errors_of_a_model_stay_what_they_are() -> None:
    model = small("llama")
    model.model.layers[1].mlp.forward = lambda x: x @ torch.ones(3, 3)
    with wrap_model_to_roundpipe(model, devices=["cpu"]) as ours, pytest.raises(RuntimeError, match="shapes"):
        train_call(ours, labelled("llama"))


def test_kernels_are_not_searched_for_in_models_that_the_host_can_run() -> None:
    plain, batch = small("llama"), labelled("llama")
    with wrapped(copy.deepcopy(plain), 2) as model:
        assert_same(train_call(model, batch), plain_loss(plain, batch))
