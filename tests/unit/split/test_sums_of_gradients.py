"""Verification compares sums of columns in place of whole gradients of large embeddings and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers_tiny_hf import tiny_model
from roundpipe.errors import ModelSplitError
from roundpipe.split import verify
from roundpipe.split.splitter import ModelSplitter
from roundpipe.split.verify import _sums_of_columns, _SumsOfGradients


class Sums:
    """Takes the place of the fingerprints: keeps what is added."""

    def __init__(self) -> None:
        self.dtypes: dict[str, torch.dtype] = {}
        self.found: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.found[name] = self.found.get(name, 0) + gradient


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_LARGEST", 0)


@pytest.mark.parametrize("width", [40, 64, 150])
def test_sums_of_a_head_are_those_of_its_gradient(width: int) -> None:
    head = nn.Linear(width, 11, bias=True)
    # Products and sums of small integers are exact.
    hidden = torch.randint(-4, 5, (2, 5, width)).float().requires_grad_()
    towards = torch.randint(-4, 5, (2, 5, 11)).float()
    sums = Sums()
    with _SumsOfGradients(head, sums):  # type: ignore[arg-type]
        output = head(hidden)
        output.backward(towards)
    assert head.weight.grad is None
    assert hidden.grad is not None
    expected_of_hidden, bias_gradient = hidden.grad, head.bias.grad
    hidden.grad = head.bias.grad = None
    plain = head(hidden)
    plain.backward(towards)
    assert torch.equal(output, plain)
    assert torch.equal(hidden.grad, expected_of_hidden)
    assert head.bias.grad is not None
    assert bias_gradient is not None
    assert torch.equal(head.bias.grad, bias_gradient)
    assert list(sums.found) == ["weight in a product"]
    assert torch.equal(sums.found["weight in a product"], _sums_of_columns(head.weight.grad))


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_sums_of_an_embedding_are_those_of_the_rows_it_used(padding_idx: int | None) -> None:
    embedding = nn.Embedding(20, 70, padding_idx=padding_idx)
    ids = torch.tensor([[1, 3, 3], [7, 1, 0]])
    towards = torch.randint(-4, 5, (2, 3, 70)).float()
    sums = Sums()
    with _SumsOfGradients(embedding, sums):  # type: ignore[arg-type]
        output = embedding(ids)
        plain = output.detach().clone()
        output *= 2.0  # models scale embeddings in place
        output.backward(towards)
    assert embedding.weight.grad is None
    assert torch.equal(plain, nn.functional.embedding(ids, embedding.weight))
    (2 * embedding(ids)).backward(towards)
    assert torch.equal(sums.found["weight in rows (4, 64)"], _sums_of_columns(embedding.weight.grad)[[0, 1, 3, 7]])


def test_frozen_weights_and_runs_without_grad_stay_as_they_are() -> None:
    embedding = nn.Embedding(20, 70)
    sums = Sums()
    with _SumsOfGradients(embedding, sums), torch.no_grad():  # type: ignore[arg-type]
        assert not embedding(torch.tensor([1])).requires_grad
    embedding.requires_grad_(False)
    with _SumsOfGradients(embedding, sums):  # type: ignore[arg-type]
        assert not embedding(torch.tensor([1])).requires_grad


@pytest.mark.parametrize("tied", [False, True])
def test_no_whole_gradient_of_a_head_is_compared(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied, vocab_size=500)
    monkeypatch.setattr(verify, "_LARGEST", model.lm_head.weight.numel() - 1)
    sizes: list[int] = []
    whole, fingerprint = model.lm_head.weight.numel(), verify.fingerprint

    def watched(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.numel())
        return fingerprint(tensor)

    monkeypatch.setattr(verify, "fingerprint", watched)
    # Sums have _WIDTH columns; this head has fewer.
    monkeypatch.setattr(verify, "_WIDTH", 4)
    assert ModelSplitter(model).learn_by_guess()
    assert sizes
    assert max(sizes) < whole


def test_another_gradient_of_a_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tie_word_embeddings=False)
    note, num_notes = _SumsOfGradients._note_product, 0

    def growing(self: Any, name: str, used: torch.Tensor, gradient: torch.Tensor) -> None:
        nonlocal num_notes
        num_notes += name == "lm_head.weight"
        note(self, name, used, gradient * num_notes)

    monkeypatch.setattr(_SumsOfGradients, "_note_product", growing)
    with pytest.raises(ModelSplitError, match=r"lm_head\.weight in a product has another gradient"):
        ModelSplitter(model).learn_by_guess()
