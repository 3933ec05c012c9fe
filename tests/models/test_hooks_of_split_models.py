"""Gradient hooks on the parameters of transformers models, which are split into layers."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import VOCAB, added_loss, labelled, own_loss, small, wrapped
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, microbatches
from roundpipe import UsageError

pytest.importorskip("transformers")

Noted = dict[str, list[Tensor]]  # by parameter: hooks of several parameters run on several devices at the same time


def mask_old_rows(grad: Tensor) -> Tensor:
    """Train the rows of new tokens only."""
    mask = torch.zeros(VOCAB, 1)
    mask[VOCAB // 2 :] = 1
    return grad * mask


def set_hooks(model: nn.Module, noted: Noted) -> None:
    def hook(grad: Tensor) -> Tensor:
        noted["embedding"].append(grad.clone())
        return mask_old_rows(grad)

    model.get_parameter("model.embed_tokens.weight").register_hook(hook)
    model.get_parameter("model.layers.1.mlp.up_proj.weight").register_post_accumulate_grad_hook(
        lambda param: noted["up"].append(param.grad.clone())  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("num_devices", [1, 3])
def test_rows_of_an_embedding_are_masked(num_devices: int) -> None:
    reference = small("llama", tie_word_embeddings=False)
    module = copy.deepcopy(reference)
    expected: Noted = {"embedding": [], "up": []}
    noted: Noted = {"embedding": [], "up": []}
    set_hooks(reference, expected)
    set_hooks(module, noted)
    model = wrapped(module, num_devices)
    try:
        for seed in (5, 6):
            batch = labelled("llama", seed=seed)
            added_loss(reference, batch)
            model.forward_backward(input_kwargs=batch, loss_fn=own_loss, run_config=microbatches(2))
            model.synchronize()
        assert_same(noted, expected, "what hooks were given; wrapping and planning run none")
        assert_same_grads(model, reference)
        grad = module.get_parameter("model.embed_tokens.weight").grad
        assert grad is not None
        assert not grad[: VOCAB // 2].any()
        assert grad[VOCAB // 2 :].any()
    finally:
        model.close()


def test_a_hook_on_a_tied_embedding_is_refused() -> None:
    module = small("llama", tie_word_embeddings=True)
    noted: Noted = {"embedding": [], "up": []}
    set_hooks(module, noted)
    model = wrapped(module, 2)
    try:
        with pytest.raises(UsageError, match=r"embed_tokens.*is used by layers 0, \d+.*step_fn"):
            model.forward_backward(input_kwargs=labelled("llama"), loss_fn=own_loss, run_config=microbatches(2))
        assert noted == {"embedding": [], "up": []}
    finally:
        model.close()
