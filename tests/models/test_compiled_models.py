"""Split models whose blocks are compiled: gradients of the plain model to rounding, the same bits on all devices."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import (
    assert_close_grads,
    labelled,
    livened,
    lora,
    plain_loss,
    plain_outputs,
    small,
    tokens,
    train_call,
    wrapped,
)
from sweep import Outcome, compare, train_plain, train_wrapped
from tiny_cases import case_named
from torch import nn

from helpers_parity import assert_same, assert_same_grads, microbatches
from helpers_slow import slow_except
from roundpipe import AutoRoundPipe, wrap_model_to_roundpipe
from roundpipe.compiled import compilations

transformers = pytest.importorskip("transformers")
AOT = {"backend": "aot_eager"}
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")  # their fallback for the CPU cannot be traced
FAMILIES = ("llama", "gemma2", "gpt2", "bert", "vit", "t5gemma", "t5", "mamba", "modernbert", "phi", *EXPERTS)


# Hybrids of attention with state spaces, recurrences and convolutions, blocks of speech and of images, and
# convolutions alone.
OTHER_MAKES = (
    "qwen3_next:Qwen3NextForCausalLM",
    "nemotron_h:NemotronHForCausalLM",
    "recurrent_gemma:RecurrentGemmaForCausalLM",
    "whisper:WhisperForCausalLM",
    "llava:LlavaForConditionalGeneration",
    "zamba:ZambaForCausalLM",
    "falcon_h1:FalconH1ForCausalLM",
    "lfm2:Lfm2ForCausalLM",
    "convnext:ConvNextForImageClassification",
)


class Counted:
    """A backend that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.num_graphs = self.num_runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*args)

        return run


@pytest.mark.filterwarnings("ignore:Error detected in")  # torch says where code that it cannot compile comes from
@pytest.mark.parametrize("model_type", slow_except(("llama", "bert", "mixtral"), FAMILIES))
def test_families_of_models(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, batch = small(model_type), labelled(model_type)
    expected = plain_loss(plain, batch)
    before = compilations().graphs
    found = []
    for num_devices in (1, 3):
        with wrapped(copy.deepcopy(plain), num_devices, compile=AOT) as model:
            loss = train_call(model, batch)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            assert_close_grads(model.original_model, plain, 2e-5)
            found.append([loss, {name: p.grad for name, p in model.original_model.named_parameters()}])
    assert_same(found[1], found[0])
    assert (compilations().graphs > before) is (model_type not in EXPERTS or model_type == "deepseek_v3")
    assert ("runs eagerly, because it cannot be compiled" in caplog.text) is (model_type in EXPERTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("key", OTHER_MAKES)
def test_models_of_other_makes(key: str) -> None:
    case = case_named(key)
    found = [train_wrapped(case, num_devices, 2, compile=AOT) for num_devices in (1, 3)]
    assert found[0] is not None
    assert found[1] is not None
    assert_same([found[1].loss, found[1].grads], [found[0].loss, found[0].grads])
    verdict = compare(found[0], train_plain(case, 2))
    assert verdict.is_enough_for(Outcome.EXACT), verdict


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for the CPU: g++")
@pytest.mark.parametrize("make", [lambda: small("gpt2", resid_pdrop=0.2), lambda: lora(small("llama"))])
def test_inductor(make: Callable[[], nn.Module]) -> None:
    plain, batch = make(), labelled("llama")
    found = []
    for num_devices, options in ((1, {}), (1, {"compile": True}), (3, {"compile": True})):
        with wrapped(copy.deepcopy(plain), num_devices, **options) as model:
            torch.manual_seed(3)
            found.append([train_call(model, batch), {n: p.grad for n, p in model.original_model.named_parameters()}])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert_same(found[2], found[1])


def test_the_number_of_graphs_does_not_grow_with_blocks() -> None:
    counts = []
    for num_layers in (2, 6):
        backend = Counted()
        with wrapped(small("llama", num_hidden_layers=num_layers), compile={"backend": backend}) as model:
            train_call(model, labelled("llama"))
            model.eval()
            with torch.no_grad():
                model(**labelled("llama"), roundpipe_run_config=microbatches(2))
            counts.append(backend.num_graphs)
    assert counts[0] == counts[1] == 2  # for training, and for evaluation


def test_dropout_draws_what_it_draws_in_eager_layers() -> None:
    plain = small("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3)
    found = []
    for num_devices, options in ((1, {}), (1, {"compile": AOT}), (3, {"compile": AOT})):
        with wrapped(copy.deepcopy(plain), num_devices, **options) as model:
            torch.manual_seed(3)
            loss = train_call(model, labelled("gpt2"))
            found.append([loss, model.original_model])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert_close_grads(found[1][1], found[0][1], 2e-5)
    assert_same(found[2][0], found[1][0], "loss")
    assert_same_grads(found[2][1], found[1][1])


def test_adapters() -> None:
    plain, batch = lora(small("llama")), labelled("llama")
    expected = plain_loss(plain, batch)
    backend = Counted()
    with wrapped(copy.deepcopy(plain), 2, compile={"backend": backend}) as model:
        torch.testing.assert_close(train_call(model, batch), expected, rtol=1e-5, atol=1e-6)
        assert_close_grads(model.original_model, plain, 2e-5)
    assert 0 < backend.num_graphs <= 2


def test_packed_weights() -> None:
    plain, backend = lora(small("llama", hidden_size=64, intermediate_size=128)), Counted()
    found = []
    for num_devices, options in (
        (2, {}),
        (1, {"compile": {"backend": backend}}),
        (3, {"compile": {"backend": backend}}),
    ):
        with wrapped(copy.deepcopy(plain), num_devices, frozen_weights="nf4", **options) as model:
            loss = train_call(model, labelled("llama"))
            found.append([loss, {name: param.grad for name, param in model.original_model.named_parameters()}])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert_same(found[2], found[1])
    assert 0 < backend.num_graphs <= 4


def test_lengths_of_batches_may_vary(caplog: pytest.LogCaptureFixture) -> None:
    plain = small("llama")
    backend = Counted()
    with wrapped(copy.deepcopy(plain), 2, compile={"backend": backend}) as model:
        for length in (7, 9, 11, 5, 13, 8):
            batch = labelled("llama", num_tokens=length)
            torch.testing.assert_close(train_call(model, batch), plain_loss(plain, batch), rtol=1e-5, atol=1e-6)
        assert_close_grads(model.original_model, plain, 2e-5)
    assert backend.num_graphs <= 4


@pytest.mark.parametrize("first", ["full", "padded"])
def test_padded_batches_are_compiled_whatever_comes_first(first: str) -> None:
    plain, backend = small("llama"), Counted()
    full = {**labelled("llama"), "attention_mask": torch.ones(4, 7, dtype=torch.int64)}
    padded = {**full, "attention_mask": full["attention_mask"].clone()}
    padded["attention_mask"][::2, :3] = 0
    batches = [full, padded] if first == "full" else [padded, full]
    with wrapped(copy.deepcopy(plain), 3, compile={"backend": backend}) as model:
        for batch in batches * 2:
            before = backend.num_runs
            torch.testing.assert_close(train_call(model, batch), plain_loss(plain, batch), rtol=1e-5, atol=1e-6)
            assert backend.num_runs - before >= 4  # two blocks, two microbatches
        assert_close_grads(model.original_model, plain, 2e-5)


def test_evaluation_is_compiled_and_generating_is_eager() -> None:
    plain, prompt = small("llama").eval(), {"input_ids": tokens(2, 6)}
    backend = Counted()
    batch = labelled("llama")
    with wrapped(copy.deepcopy(plain), 2, compile={"backend": backend}) as model, torch.no_grad():
        outputs = model(**batch, use_cache=False, roundpipe_run_config=microbatches(2))
        torch.testing.assert_close(outputs.logits, plain_outputs(plain, batch).logits, rtol=1e-4, atol=1e-5)
        runs = backend.num_runs
        assert runs
        options = {"max_new_tokens": 4, "do_sample": False}
        assert_same(model.generate(**prompt, **options), plain.generate(**prompt, **options))
        assert backend.num_runs == runs


# Models of which the user has compiled something.


@pytest.mark.parametrize("path", ["", "model", "model.layers.1.mlp"])
@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_what_the_user_compiled_is_compiled_in_the_layers(path: str, how: str) -> None:
    plain, batch, backend = small("llama"), labelled("llama"), Counted()
    expected = plain_loss(plain, batch)
    given: Any = copy.deepcopy(plain)
    module = given.get_submodule(path)
    if how == "module.compile()":
        module.compile(backend=backend)
    elif not path:
        given = torch.compile(given, backend=backend)
    else:
        parent, _, name = path.rpartition(".")
        setattr(given.get_submodule(parent), name, torch.compile(module, backend=backend))
    with wrapped(given) as model:
        torch.testing.assert_close(train_call(model, batch), expected, rtol=1e-5, atol=1e-6)
        assert_close_grads(model.original_model, plain, 2e-5)
        assert list(model.state_dict()) == list(plain.state_dict())
    assert backend.num_graphs == 1
    assert backend.num_runs >= 2


class Tower(nn.Module):
    """Has Python code between its parts, so that it is wrapped part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x) * 2)
        return found


@pytest.mark.parametrize("how", ["compile=", "torch.compile(model)", "module.compile()"])
def test_parts_of_a_model_that_is_wrapped_part_by_part(how: str) -> None:
    plain, backend = livened(Tower()), Counted()
    given: Any = copy.deepcopy(plain)
    if how == "torch.compile(model)":
        given = torch.compile(given, backend=backend)
    elif how == "module.compile()":
        given.compile(backend=backend)
    options = {"compile": {"backend": backend}} if how == "compile=" else {}
    x = torch.randn(6, 8)
    with wrap_model_to_roundpipe(given, False, upper_threshold=0, devices=["cpu"] * 2, **options) as model:
        assert isinstance(model, AutoRoundPipe)
        loss = model(x).square().sum()
        loss.backward()
        model.synchronize()
        reference = plain(x).square().sum()
        reference.backward()
        torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert backend.num_graphs >= 2
    assert backend.num_runs >= 4
