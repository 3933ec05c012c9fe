"""Weights stay on a device while generate() runs, where they fit; everything that goes wrong there ends in uploads.

Also: a call that fills a cache and fails in the middle is repeated with the cache as it was.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Batch, lora, small, tokens, wrapped
from torch import Tensor, nn

from helpers_parity import assert_same
from helpers_slow import slow_except
from roundpipe.api import split_model
from roundpipe.api.planner import Planner
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.runtime.replica import LayerImages
from roundpipe.runtime.stage import _Task
from roundpipe.split.caches import CacheContents

transformers = pytest.importorskip("transformers")

NUM_NEW = 5
FELL_BACK = "uploads layer by layer"


def prompt() -> Batch:
    ids = tokens(2, 9)
    ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generated(model: Any, **options: Any) -> Any:
    transformers.set_seed(7)
    return model.generate(
        **prompt(), **{"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, **options}
    )


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that were uploaded."""
    seen: list[int] = []
    real = LayerImages._upload

    def upload(self: LayerImages, run: Any, of_task: Any, layer_id: int, place: Any) -> None:
        seen.append(layer_id)
        real(self, run, of_task, layer_id, place)

    monkeypatch.setattr(LayerImages, "_upload", upload)
    return seen


@pytest.mark.parametrize("model_type", ["llama", "mamba"])
def test_no_layer_is_uploaded_while_all_weights_are_on_a_device(model_type: str, uploads: list[int]) -> None:
    plain = small(model_type).eval()
    with wrapped(copy.deepcopy(plain), 2) as model:
        assert_same(generated(model), generated(plain))
        assert not uploads
        ids = tokens(2, 5)
        with torch.no_grad():
            assert_same(model(input_ids=ids, use_cache=False).logits.shape, plain(input_ids=ids).logits.shape)
        assert uploads, "a call outside of generate() uploads"


def test_a_model_that_does_not_fit_is_uploaded_layer_by_layer(
    uploads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small("llama").eval()
    size = sum(param.nbytes for param in plain.parameters())
    monkeypatch.setattr(split_model, "available_host_bytes", lambda: int(size / 0.7) - 1)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(generated(model), generated(plain))
        assert len(uploads) >= NUM_NEW * model.num_layers


def test_the_layers_of_such_a_model_that_fit_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small("llama").eval()
    size = sum(param.nbytes for param in plain.parameters())
    monkeypatch.setattr(VirtualDevice, "memory_limit_bytes", lambda self: int(1.3 * size))
    with wrapped(copy.deepcopy(plain), 2) as model:
        assert_same(generated(model), generated(plain))
        model.synchronize()
        stats = model.stats()
        # The prompt and the tokens after it have plans of their own: each uploads what it needs once.
        assert size <= stats.weights_up_bytes <= 2 * size + 10_000
        assert stats.weights_up_bytes + stats.weights_kept_bytes >= NUM_NEW * size


def test_adapters_and_hooks_act_on_the_device() -> None:
    plain = lora(small("llama"), "q_proj", "v_proj").eval()
    seen: list[int] = []
    for module in plain.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, args, output: seen.append(1) or output * 1.5)  # type: ignore[func-returns-value]
    ours = copy.deepcopy(plain)
    expected = generated(plain)
    assert len(seen) == NUM_NEW
    with wrapped(ours) as model:
        assert_same(generated(model), expected)
    assert len(seen) >= 2 * NUM_NEW


def test_weights_written_between_two_tokens_count_from_the_next_token_on() -> None:
    class Writes:
        """A logits processor that changes the head once."""

        def __init__(self, model: nn.Module) -> None:
            self.head, self.calls = model.get_parameter("lm_head.weight"), 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                with torch.no_grad():
                    self.head.neg_()
            return scores

    def run(model: Any) -> Any:
        return generated(model, logits_processor=transformers.LogitsProcessorList([Writes(model)]))

    plain = small("llama", tie_word_embeddings=False).eval()
    untouched = generated(plain)
    with wrapped(copy.deepcopy(plain)) as model:
        found = run(model)
    assert_same(found, run(plain))
    assert not torch.equal(found, untouched)


def test_nothing_stays_on_the_device_after_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[nn.Module]] = []
    real = split_model._on

    def on(*args: Any) -> nn.Module:
        made = real(*args)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(split_model, "_on", on)
    with wrapped(small("llama").eval()) as model:
        generated(model)
        gc.collect()
        assert [copy() for copy in copies] == [None]


@pytest.mark.parametrize(("dropout", "stays"), [(0.0, True), (0.1, False)])
def test_a_training_model_stays_on_the_device_unless_it_draws(dropout: float, stays: bool, uploads: list[int]) -> None:
    plain = small("llama", attention_dropout=dropout).train()
    with wrapped(copy.deepcopy(plain)) as model:
        found = generated(model)
        assert bool(uploads) is not stays
        if stays:
            assert_same(found, generated(plain))


# Failures.


class Fails:
    """Raises once, in call number `at` after `arm`; as a hook, it fails the forward of a module."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.calls, self.at, self.error = 0, at, error
        self.is_armed = False

    def arm(self) -> None:
        self.is_armed = True

    def is_due(self) -> bool:
        return self.calls == self.at

    def __call__(self, module: Any, args: Any) -> None:
        self.calls += self.is_armed
        if self.is_armed and self.is_due():
            raise self.error


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("device memory is full")


def last_block(model: nn.Module) -> nn.Module:
    blocks = [module for name, module in model.named_modules() if name.split(".")[-1] == "1"]
    return blocks[0]


@pytest.mark.parametrize("at", range(1, NUM_NEW + 1))
def test_a_forward_that_runs_out_of_memory_goes_on_with_uploads(
    at: int, uploads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """In the last block: the cache of the first one is filled by then."""
    plain = small("llama").eval()
    ours = copy.deepcopy(plain)
    fails = Fails(at, out_of_memory())
    last_block(ours).register_forward_pre_hook(fails)
    with wrapped(ours) as model, caplog.at_level(logging.INFO, "roundpipe"):
        fails.arm()
        assert_same(generated(model), generated(plain))
    assert uploads
    assert sum(FELL_BACK in record.getMessage() for record in caplog.records) == 1


def test_a_model_whose_copy_cannot_run_is_uploaded(
    monkeypatch: pytest.MonkeyPatch, uploads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As one that keeps a tensor of its own in host memory; the reason is logged."""

    def refuse(*args: Any) -> nn.Module:
        raise RuntimeError("Expected all tensors to be on the same device")

    plain = small("llama").eval()
    monkeypatch.setattr(split_model, "_on", refuse)
    with wrapped(copy.deepcopy(plain)) as model, caplog.at_level(logging.INFO, "roundpipe"):
        assert_same(generated(model), generated(plain))
    assert uploads
    assert any("to be on the same device" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("at", [1, 2])
def test_an_error_of_the_model_is_raised(at: int) -> None:
    ours = small("llama").eval()

    class Always(Fails):
        def is_due(self) -> bool:
            return self.calls >= self.at

    fails = Always(at, ZeroDivisionError("in a block"))
    handle = last_block(ours).register_forward_pre_hook(fails)
    with wrapped(ours) as model:
        fails.arm()
        with pytest.raises(ZeroDivisionError, match="in a block"):
            generated(model)
        handle.remove()
        generated(model)


@pytest.mark.parametrize("at", slow_except((2, 3, 4, 7, 8, 19), range(1, 4 * NUM_NEW + 1)))
def test_a_streamed_token_that_runs_out_of_memory_is_repeated_with_the_cache_as_it_was(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any layer of any token."""
    monkeypatch.setattr(split_model, "_WEIGHTS_SHARE", 0.0)
    monkeypatch.setattr(Planner, "plan_smaller", lambda self: True)
    plain = small("llama", seed=8).eval()
    expected = generated(plain, output_logits=True, return_dict_in_generate=True)
    with wrapped(copy.deepcopy(plain)) as model:
        generated(model)  # plans the calls
        real, forwards = _Task._forward_layer, Fails(at, out_of_memory())
        forwards.arm()

        def forward(self: _Task, *args: Any) -> Any:
            forwards(None, ())
            return real(self, *args)

        monkeypatch.setattr(_Task, "_forward_layer", forward)
        found = generated(model, output_logits=True, return_dict_in_generate=True)
        assert model.num_layers == 4
        assert forwards.calls > 4 * NUM_NEW, "the failing layer ran twice"
    assert_same((found.sequences, found.logits), (expected.sequences, expected.logits))


def test_a_token_whose_cache_cannot_be_restored_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a recurrent model are overwritten: a second forward would count a token twice."""
    monkeypatch.setattr(split_model, "_WEIGHTS_SHARE", 0.0)
    monkeypatch.setattr(Planner, "plan_smaller", lambda self: True)
    with wrapped(small("mamba").eval()) as model:
        expected = generated(model)
        real, forwards = _Task._forward_layer, Fails(model.num_layers * 2, out_of_memory())
        forwards.arm()

        def forward(self: _Task, *args: Any) -> Any:
            forwards(None, ())
            return real(self, *args)

        monkeypatch.setattr(_Task, "_forward_layer", forward)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            generated(model)
        assert any("begin with a new cache" in note for note in caught.value.__notes__)
        assert_same(generated(model), expected, "the next call")


# What a cache held before.


def filled(cache: Any, length: int, layers: int = 2) -> Any:
    generator = torch.Generator().manual_seed(length)
    for layer in range(layers):
        cache.update(*(torch.randn(1, 2, length, 4, generator=generator) for _ in range(2)), layer)
    return cache


def content(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]


def sliding(window: int) -> Any:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=window)
    return transformers.DynamicCache(config=config)


MAKERS: dict[str, Callable[[], Any]] = {
    "growing": transformers.DynamicCache,
    "sliding": lambda: sliding(8),
    "two": lambda: transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache()),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_empty_cache_is_emptied(kind: str) -> None:
    cache = MAKERS[kind]()
    before = CacheContents((), {"past_key_values": cache})
    inside = cache.self_attention_cache if kind == "two" else cache
    filled(inside, 3)
    assert before.restore(ValueError())
    again = MAKERS[kind]()
    again = again.self_attention_cache if kind == "two" else again
    assert_same(content(filled(inside, 5)), content(filled(again, 5)))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_growing_cache_is_cut_back(layers: int) -> None:
    cache = filled(transformers.DynamicCache(), 3)
    expected = [tensor.clone() for tensor in content(cache)]
    before = CacheContents((cache,), {})
    filled(cache, 4, layers)
    assert before.restore(ValueError())
    assert_same(content(cache), expected)


@pytest.mark.parametrize(("length", "grown"), [(5, 4), (9, 1), (2, 1)])
def test_a_sliding_cache_that_has_changed_is_not_restored(length: int, grown: int) -> None:
    cache = filled(sliding(8), length)
    before = CacheContents((), {"cache": cache})
    assert before.restore(ValueError()), "it has not changed yet"
    filled(cache, grown, layers=1)
    assert not before.restore(ValueError())


def test_writes_into_the_tensors_of_a_cache_are_found() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
    cache = filled(transformers.StaticCache(config=config, max_cache_len=9), 3, layers=1)
    before = CacheContents((), {"cache": cache})
    assert before.restore(ValueError())
    filled(cache, 2, layers=1)
    assert not before.restore(ValueError())
