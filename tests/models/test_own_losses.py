"""Models that compute their own loss: logits that are not needed are not computed.

Logits are made "too large" by setting what is too large; what is computed without them differs in the order of sums.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import (
    ROUNDING,
    VOCAB,
    Batch,
    added_loss,
    assert_close_grads,
    labelled,
    lora,
    own_loss,
    plain_loss,
    ragged,
    small,
    tokens,
    train_call,
    wrapped,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers_parity import assert_same, assert_same_grads, call_reference, microbatches
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.runtime.stage import StageRunner
from roundpipe.split import head_loss

pytest.importorskip("transformers")

WHOLE = {"whole_batch_loss": True}
Labels = list[Tensor | None]


# Logits that are not needed.


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all logits count as too large; chunks have a few rows."""
    monkeypatch.setattr(head_loss, "LOGITS_BYTES", 1)
    monkeypatch.setitem(head_loss.linear_cross_entropy.__kwdefaults__, "logits_bytes", 5 * 8 * VOCAB)


def call_seeing_logits(model: RoundPipe, batch: Batch, **options: Any) -> tuple[Any, Labels]:
    """The call's result, and what loss_fn was given as logits."""
    seen: Labels = []

    def look(output: Any, label: Any) -> Tensor:
        seen.append(output.logits)
        return own_loss(output, label)

    returned = options.pop("return_outputs", False)
    config = RoundPipeRunConfig(num_microbatch=2, **options)
    result = model.forward_backward((), batch, loss_fn=look, return_outputs=returned, run_config=config)
    model.synchronize()
    return result, seen


DROPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "head_of_its_own": ("llama", {}),
    "tied_head": ("llama", {"tie_word_embeddings": True}),
    "tied_gpt2": ("gpt2", {}),
    "head_with_bias": ("phi", {}),
    "head_without_gradient": ("qwen3", {}),
    "masked_lm": ("modernbert", {}),
    "experts": ("mixtral", {}),
    "state_space": ("mamba", {}),
    "head_whose_output_is_made_contiguous": ("opt", {}),
}


@pytest.mark.parametrize(("model_type", "config"), DROPPED.values(), ids=DROPPED)
@pytest.mark.usefixtures("large")
def test_loss_and_gradients_without_logits_are_plain_to_rounding(model_type: str, config: dict[str, Any]) -> None:
    plain, batch = small(model_type, **config), ragged(model_type)
    batch["labels"][-1, -2:] = 3  # some in every microbatch, shifted or not
    if model_type == "qwen3":
        plain.get_output_embeddings().requires_grad_(False)
    with wrapped(copy.deepcopy(plain)) as model:
        loss, logits = call_seeing_logits(model, batch)
        torch.testing.assert_close(loss, added_loss(plain, batch), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, ROUNDING)
    assert logits == [None, None]


@pytest.mark.usefixtures("large")
def test_adapters_train_without_logits() -> None:
    plain, batch = lora(small("llama")), labelled("llama")
    with wrapped(copy.deepcopy(plain)) as model:
        loss, logits = call_seeing_logits(model, batch)
        torch.testing.assert_close(loss, added_loss(plain, batch), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, ROUNDING)
    assert logits == [None, None]


@pytest.mark.usefixtures("large")
def test_bfloat16_without_logits() -> None:
    """A few roundings to 8 bits apart: of the logits' gradients, and of sums over rows."""
    plain, batch = small("llama").to(torch.bfloat16), labelled("llama")
    with wrapped(copy.deepcopy(plain)) as model:
        loss, logits = call_seeing_logits(model, batch)
        torch.testing.assert_close(loss, added_loss(plain, batch), atol=0.0, rtol=1e-5)
        assert_close_grads(model.original_model, plain, 3e-2)
    assert logits == [None, None]


@pytest.mark.usefixtures("large")
def test_num_items_in_batch_is_used_without_logits() -> None:
    """The user's number, and the one of `whole_batch_loss`."""
    plain, batch = small("llama"), ragged("llama", num_rows=3)
    given = {**batch, "num_items_in_batch": torch.tensor(11)}
    with wrapped(copy.deepcopy(plain)) as model:
        loss, logits = call_seeing_logits(model, given)
        torch.testing.assert_close(loss, added_loss(plain, given), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, ROUNDING)
        assert logits == [None, None]
        plain.zero_grad()
        model.zero_grad()
        expected = plain(**batch).loss
        expected.backward()
        loss, logits = call_seeing_logits(model, batch, **WHOLE)
        torch.testing.assert_close(loss, expected.detach(), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, ROUNDING)
        assert logits == [None, None]


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "bert", "t5"])
@pytest.mark.usefixtures("large")
def test_logits_that_do_not_go_straight_into_the_loss_are_kept_and_exact(model_type: str) -> None:
    """Capped, scaled, or with a loss in the model's own code; only a tied weight's gradient is summed otherwise."""
    plain, batch = small(model_type), labelled(model_type)
    with wrapped(copy.deepcopy(plain)) as model:
        loss, logits = call_seeing_logits(model, batch, keep_logits=False)
        assert_same(loss, added_loss(plain, batch), "loss")
        assert_close_grads(model.original_model, plain, 1e-6)
        tied = plain.get_input_embeddings().weight
        pairs = zip(model.original_model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(ours.grad, param.grad) for ours, param in pairs if param is not tied)
    assert [one.shape[-1] for one in logits if one is not None] == [VOCAB, VOCAB]


@pytest.mark.parametrize(
    ("keep_logits", "returned", "there"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False), (False, False, False)],
)
@pytest.mark.usefixtures("large")
def test_logits_are_returned_when_they_are_needed(keep_logits: bool | None, returned: bool, there: bool) -> None:
    plain, batch = small("llama"), labelled("llama")
    expected = call_reference(plain, kwargs=batch, loss_fn=own_loss, num_microbatch=2)
    with wrapped(copy.deepcopy(plain)) as model:
        result, seen = call_seeing_logits(model, batch, keep_logits=keep_logits, return_outputs=returned)
        assert [one is not None for one in seen] == [there] * 2
        loss, outputs = result if returned else (result, None)
        torch.testing.assert_close(loss, expected.loss, atol=0.0, rtol=1e-6)
        if there:
            assert_same_grads(model.original_model, plain)
        if outputs is not None:
            assert_same(outputs.logits, expected.outputs.logits if there else None, "logits")


def test_logits_that_are_not_large_are_kept() -> None:
    plain, batch = small("llama"), labelled("llama")
    with wrapped(copy.deepcopy(plain)) as model:
        loss, seen = call_seeing_logits(model, batch)
        assert_same(loss, added_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
    assert [one.shape for one in seen if one is not None] == [(2, 7, VOCAB)] * 2


def test_outputs_without_logits_are_merged_where_only_some_microbatches_were_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, batch = small("llama"), labelled("llama", num_rows=5)
    monkeypatch.setattr(head_loss, "LOGITS_BYTES", 2 * 7 * 8 * VOCAB)  # of three rows, but not of two
    with wrapped(copy.deepcopy(plain)) as model:
        (loss, outputs), _ = call_seeing_logits(model, batch, keep_logits=False, return_outputs=True)
    torch.testing.assert_close(loss, added_loss(plain, batch), atol=0.0, rtol=1e-6)
    torch.testing.assert_close(outputs.loss * 2, loss)


def half(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1)) / 2


@pytest.mark.parametrize("logits_bytes", [1, 10**9], ids=["large", "not_large"])
def test_a_loss_function_set_after_wrapping_is_used(logits_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "LOGITS_BYTES", logits_bytes)
    plain, batch = small("llama"), labelled("llama")
    with wrapped(copy.deepcopy(plain)) as model:
        train_call(model, batch)
        model.zero_grad()
        for either in (model, plain):
            either.loss_function = half
        torch.testing.assert_close(train_call(model, batch), plain_loss(plain, batch), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, ROUNDING)


@pytest.mark.usefixtures("large")
def test_a_loss_that_is_nearly_a_cross_entropy_is_not_taken_for_one() -> None:
    """With a term that keeps logits small, as is usual for experts; its share of the loss is below a thousandth."""
    plain, batch = small("llama"), labelled("llama")
    library_loss = plain.loss_function

    def with_small_logits(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        loss: Tensor = library_loss(logits, labels, vocab_size, **kwargs)
        return loss + 1e-4 * logits.logsumexp(-1).square().mean()

    module = copy.deepcopy(plain)
    for either in (plain, module):
        either.loss_function = with_small_logits
    with wrapped(module) as model:
        torch.testing.assert_close(train_call(model, batch), plain_loss(plain, batch), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, ROUNDING)


# Memory.


class LargestStorage(TorchDispatchMode):
    """Records the size of the largest storage made inside it, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.num_bytes = max([self.num_bytes, *sizes])
        return made


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LargestStorage]]:
    """One for each task that a device carries out, backward included."""
    found: list[LargestStorage] = []
    run = StageRunner.run

    def watched(self: StageRunner, *args: Any) -> None:
        with LargestStorage() as storage:
            found.append(storage)
            run(self, *args)

    monkeypatch.setattr(StageRunner, "run", watched)
    yield found
    found.clear()


@pytest.mark.usefixtures("large")
def test_no_tensor_of_all_tokens_by_the_whole_vocabulary_is_made(storages: list[LargestStorage]) -> None:
    batch = labelled("llama", num_rows=4, num_tokens=120)  # more tokens than a weight of the head has columns
    one_microbatch = 2 * 120 * VOCAB * 4
    largest = {}
    for keep_logits in (False, True):
        with wrapped(small("llama")) as model:
            call_seeing_logits(model, batch, keep_logits=keep_logits)
        largest[keep_logits] = max(storage.num_bytes for storage in storages)
        storages.clear()
    assert largest[True] >= one_microbatch
    assert largest[False] < one_microbatch / 2


def test_the_options_are_checked() -> None:
    for name in ("keep_logits", "whole_batch_loss"):
        with pytest.raises(TypeError, match=f"{name} must be True, False or None"):
            RoundPipeRunConfig(**{name: 1})
    overlaid = RoundPipeRunConfig(keep_logits=False).over(RoundPipeRunConfig(keep_logits=True, **WHOLE))
    assert (overlaid.keep_logits, overlaid.whole_batch_loss) == (False, True)
    assert {field.default for field in dataclasses.fields(RoundPipeRunConfig)} == {None}


def test_a_loss_fn_over_the_logits_sees_them_where_labels_are_given_beside_the_model() -> None:
    plain, batch = small("llama"), labelled("llama")

    def next_token(output: Any, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, VOCAB), label[:, 1:].reshape(-1))

    ids = {"input_ids": tokens(4, 7)}
    with wrapped(copy.deepcopy(plain)) as model:
        loss = model.forward_backward((), ids, batch["labels"], next_token, run_config=microbatches(2))
        model.synchronize()
        assert_same(loss, call_reference(plain, (), ids, batch["labels"], next_token, 2).loss)
        assert_same_grads(model.original_model, plain)
