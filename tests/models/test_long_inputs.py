"""Long, packed, padded and embedded inputs: tiles change memory and nothing else, and samples stay apart.

What is long is set small here. A tile's gradients are summed with those of the others, so results are the untiled ones
to rounding; everything that is not tiled is exact.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import (
    IGNORED,
    VOCAB,
    Batch,
    assert_close_grads,
    labelled,
    lora,
    plain_loss,
    small,
    tokens,
    train_call,
    wrapped,
)
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, grads_of, microbatches
from helpers_slow import slow_except
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.split import head_loss, tiling

pytest.importorskip("transformers")

LONG, TILE = 20, 10  # tokens in a microbatch
Seen = list[tuple[str, int]]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Records by class which modules were tiled, and the number of tiles of each run."""
    monkeypatch.setattr(tiling, "LONG_TOKENS", LONG)
    monkeypatch.setattr(tiling, "TILE_TOKENS", TILE)
    seen: Seen = []
    run = tiling._TiledForward.__call__

    def watched(self: Any, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = max(TILE // given.shape[0], 1)
        seen.append((type(self._forward.__self__).__name__, -(-given.shape[1] // length)))
        return run(self, given, *args, **kwargs)

    monkeypatch.setattr(tiling._TiledForward, "__call__", watched)
    yield seen
    seen.clear()


# Tiles.


@pytest.mark.parametrize(
    ("model_type", "classes"),
    [
        ("llama", {"LlamaMLP", "LlamaRMSNorm"}),
        ("qwen3", {"Qwen3MLP", "Qwen3RMSNorm"}),
        ("gpt2", {"GPT2MLP"}),
        ("bert", {"BertIntermediate"}),
        ("mixtral", {"MixtralRMSNorm"}),
        ("t5", {"T5LayerFF"}),
    ],
)
def test_tiled_losses_and_gradients_are_the_plain_ones_to_rounding(
    model_type: str, classes: set[str], tiles: Seen
) -> None:
    plain, batch = small(model_type), labelled(model_type, 4, 24)
    with wrapped(copy.deepcopy(plain)) as model:
        loss = train_call(model, batch)
        torch.testing.assert_close(loss, plain_loss(plain, batch), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, 1e-6)
    assert classes <= {name for name, _ in tiles}
    assert {count for _, count in tiles} == {5}
    assert not any("Experts" in name or "MoeBlock" in name or "Attention" in name for name, _ in tiles)


def test_inputs_that_are_not_long_are_not_tiled(tiles: Seen) -> None:
    plain, batch = small("llama"), labelled("llama", 4, 10)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
        assert tiles == []
        train_call(model, labelled("llama", 4, 11))
        assert tiles != []


def test_tiles_are_the_same_on_any_number_of_devices(tiles: Seen) -> None:
    found = []
    for num_devices, grain in ((1, "stage"), (3, "layer")):
        with wrapped(small("llama"), num_devices) as model:
            loss = train_call(model, labelled("llama", 6, 24), 3, recompute_grain=grain)
            found.append((loss, grads_of(model.original_model)))
    assert_same(found[1], found[0])
    assert tiles


def test_adapters_are_tiled_with_what_they_adapt(tiles: Seen) -> None:
    plain, batch = lora(small("llama")), labelled("llama", 4, 24)
    with wrapped(copy.deepcopy(plain)) as model:
        torch.testing.assert_close(train_call(model, batch), plain_loss(plain, batch), atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, 1e-6)
    assert ("LlamaMLP", 5) in tiles


def next_token_loss(output: Any, label: Tensor) -> Tensor:
    """In the precision of the logits; the library's own is in float32."""
    return nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, VOCAB), label[:, 1:].reshape(-1))


@pytest.mark.parametrize("wrapped_in", ["train", "eval"])
def test_gradients_with_dropout_are_the_derivative_of_the_loss(wrapped_in: str, tiles: Seen) -> None:
    """A tile recomputed with another dropout mask would give the gradient of another loss.

    Models are loaded in eval mode, so what is found out when they are wrapped must hold in train mode. In float64 a
    difference of losses tells the derivative along a direction to about nine digits.
    """
    module = small("gpt2", resid_pdrop=0.3).double()
    module.train(wrapped_in == "train")
    ids, generator = tokens(4, 24), torch.Generator().manual_seed(3)
    with wrapped(module) as model:
        model.train()
        directions = [torch.randn(param.shape, generator=generator, dtype=param.dtype) for param in model.parameters()]

        def loss_after(distance: float) -> Tensor:
            with torch.no_grad():
                for param, direction in zip(model.parameters(), directions, strict=True):
                    param.add_(direction, alpha=distance)
            torch.manual_seed(5)
            loss: Tensor = model.forward_backward((), {"input_ids": ids}, ids, next_token_loss)
            return loss

        loss_after(0.0)
        model.zero_grad()  # the first call is also planned for
        loss_after(0.0)
        model.synchronize()
        slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), directions, strict=True))
        step = 1e-6
        behind, ahead = loss_after(-step), loss_after(2 * step)
    torch.testing.assert_close((ahead - behind) / (2 * step), slope, atol=0.0, rtol=1e-5)
    names = {name for name, _ in tiles}
    assert "Conv1D" in names
    assert "GPT2MLP" not in names, "it draws"


def saved_bytes(block: nn.Module, hidden: Tensor, paths: tuple[str, ...], **arguments: Any) -> int:
    """Return the bytes that autograd saves in one run of a block, each storage once, including inputs of tiles."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for path in paths:
        block.get_submodule(path).register_forward_pre_hook(lambda _, given: (note(given[0]), None)[1])
    hidden = hidden.clone().requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with tiling.tiled(block, paths), hooks:
        out = block(hidden, **arguments)
    out.sum().backward()
    assert hidden.grad is not None
    weights = {param.untyped_storage().data_ptr() for param in block.parameters()}
    return sum(size for place, size in kept.items() if place not in weights)


def test_a_tiled_block_keeps_less_for_backward(tiles: Seen) -> None:
    """A feed-forward part eight times as wide as the model saves most of a block's activations."""
    plain = small("llama", intermediate_size=256)
    with wrapped(copy.deepcopy(plain)) as model:
        train_call(model, labelled("llama", 4, 24))
        (plan, *_) = [placed.plan for placed in model._engine.split_model._splitter._arrangement.placed]
        paths = plan.tokenwise["model.layers.0"]
    assert "mlp" in paths
    hidden = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    positions = plain.model.rotary_emb(hidden, torch.arange(64)[None])
    whole, in_tiles = (
        saved_bytes(copy.deepcopy(plain.model.layers[0]), hidden, used, position_embeddings=positions)
        for used in ((), paths)
    )
    assert in_tiles < whole / 3


# Packed.


LENGTHS = (8, 5, 7)


def packed(num_rows: int = 1, **more: Any) -> Batch:
    """Each row has three documents; positions begin anew with each, and no label is predicted across."""
    ids = tokens(num_rows, sum(LENGTHS))
    labels, starts = ids.clone(), torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    labels[:, starts] = IGNORED
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(num_rows, -1)
    return {"input_ids": ids, "position_ids": positions.clone(), "labels": labels, **more}


def sequence_lengths() -> Batch:
    """The additional inputs of a packed row that a collator makes for variable-length attention kernels."""
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(LENGTHS)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


@pytest.mark.parametrize("more", [{}, sequence_lengths()], ids=["positions", "cu_seq_lens"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_a_packed_row_is_one_microbatch_and_equals_plain(model_type: str, more: Batch) -> None:
    """Whatever number of microbatches is asked for. Only a tied weight's gradient is not exact."""
    batch = packed(**more)
    plain = small(model_type, tie_word_embeddings=False)
    expected = plain_loss(plain, {**batch, "use_cache": False}, 1)
    with wrapped(copy.deepcopy(plain).requires_grad_(), 3) as model:
        for config in (microbatches(1), RoundPipeRunConfig()):
            model.zero_grad()
            assert_same(model.forward_backward(input_kwargs=batch, run_config=config), expected, "loss")
            model.synchronize()
            assert_same_grads(model.original_model, plain)


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    batch = packed()
    ids = batch["input_ids"]
    with torch.no_grad(), wrapped(small("llama").eval()) as model:
        together = model(input_ids=ids, position_ids=batch["position_ids"]).logits
        apart = [model(input_ids=document).logits for document in ids.split(LENGTHS, dim=1)]
        torch.testing.assert_close(together, torch.cat(apart, dim=1), atol=1e-5, rtol=1e-5)
        assert (model(input_ids=ids).logits - together).abs().max() > 0.1, "it makes no difference"


def test_packed_rows_are_cut_into_microbatches_row_by_row() -> None:
    plain, batch = small("llama"), packed(4)
    with wrapped(copy.deepcopy(plain), 3) as model:
        assert_same(train_call(model, batch, 3), plain_loss(plain, {**batch, "use_cache": False}, 3), "loss")
        assert_same_grads(model.original_model, plain)


def test_logits_of_a_packed_row_are_dropped_as_those_of_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows are long, so their logits are often too large."""
    monkeypatch.setattr(head_loss, "LOGITS_BYTES", 1)
    plain, batch = small("llama"), packed(**sequence_lengths())
    seen = []

    def look(output: Any, label: Any) -> Tensor:
        seen.append(output.logits)
        loss: Tensor = output.loss
        return loss

    expected = plain_loss(plain, {**batch, "use_cache": False}, 1)
    with wrapped(copy.deepcopy(plain).requires_grad_()) as model:
        loss = model.forward_backward(input_kwargs=batch, loss_fn=look)
        model.synchronize()
        torch.testing.assert_close(loss, expected, atol=0.0, rtol=1e-6)
    assert seen == [None]


# Padded, and embedded by the user.


@pytest.mark.parametrize(
    ("model_type", "side"),
    slow_except(
        [("llama", "right"), ("gemma2", "left"), ("bert", "right")],
        itertools.product(("llama", "gemma2", "bert"), ("left", "right")),
    ),
)
def test_padded_batches_equal_plain(model_type: str, side: str) -> None:
    plain, batch = small(model_type, tie_word_embeddings=False), labelled(model_type, 5, 9)
    mask = torch.ones(5, 9, dtype=torch.long)
    for row, length in enumerate((9, 4, 7, 9, 2)):
        mask[row, length:] = 0
    mask = mask if side == "right" else mask.flip(1)
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss = train_call(model, batch, 4)
        labels = batch["labels"] if model_type == "bert" else batch["labels"][:, 1:]
        counts = [int((piece != IGNORED).sum()) for piece in labels.tensor_split(4)]
        assert_same(loss, plain_loss(plain, batch, 4, counts), "loss")
        assert_same_grads(model.original_model, plain)
        model.zero_grad()
        without = {name: value for name, value in batch.items() if name != "attention_mask"}
        if side == "left" or model_type == "bert":  # causal positions do not see what comes after them
            assert (train_call(model, without, 4) - loss).abs() > 1e-3, "the mask makes no difference"


@pytest.mark.parametrize("way", ["forward_backward", "forward"])
def test_embedded_inputs_get_the_gradient_of_the_plain_model(way: str) -> None:
    plain = small("llama")
    embedded, labels = torch.randn(5, 9, 32, generator=torch.Generator().manual_seed(2)), tokens(5, 9)
    theirs, ours = (embedded.clone().requires_grad_() for _ in range(2))
    expected = plain_loss(plain, {"inputs_embeds": theirs, "labels": labels}, 3)
    with wrapped(copy.deepcopy(plain)) as model:
        loss = run_embedded(model, {"inputs_embeds": ours, "labels": labels}, way)
        assert_same((loss, ours.grad), (expected, theirs.grad))
        assert_same_grads(model.original_model, plain)
        assert plain.get_input_embeddings().weight.grad is None


def run_embedded(model: RoundPipe, batch: Batch, way: str) -> Tensor:
    if way == "forward_backward":
        return train_call(model, batch, 3)  # type: ignore[no-any-return]
    loss: Tensor = model(**batch, roundpipe_run_config=microbatches(3)).loss
    loss.backward()
    model.synchronize()
    return loss.detach()


def test_a_soft_prompt_before_the_tokens_trains() -> None:
    """The user's own parameter in front of embedded tokens, both from outside the model."""
    plain, ids = small("llama"), tokens(4, 6)
    plain.requires_grad_(False)
    plain.model.layers[0].requires_grad_(True)
    grads = []
    for use in ("plain", "wrapped"):
        module = copy.deepcopy(plain)
        prompt = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        embedded = torch.cat([prompt.expand(4, -1, -1), module.get_input_embeddings()(ids).detach()], dim=1)
        batch = {"inputs_embeds": embedded, "labels": nn.functional.pad(ids, (3, 0), value=IGNORED)}
        if use == "plain":
            leaf = embedded.detach().requires_grad_()
            plain_loss(module, {**batch, "inputs_embeds": leaf})
            embedded.backward(leaf.grad)
            grads.append((prompt.grad, grads_of(module)))
        else:
            with wrapped(module) as model:
                train_call(model, batch)
                grads.append((prompt.grad, grads_of(model.original_model)))
    assert_same(grads[1], grads[0])
    assert grads[0][0].shape == (3, 32)


def test_the_output_of_a_tokenizer_is_accepted_as_inputs() -> None:
    """A BatchEncoding is a mapping, but no dict."""
    plain, batch = small("llama"), labelled("llama")
    encoded = pytest.importorskip("transformers").BatchEncoding(batch)
    with wrapped(copy.deepcopy(plain), example_inputs=encoded) as model:
        assert_same(train_call(model, encoded), plain_loss(plain, batch), "loss")
