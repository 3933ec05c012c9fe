"""Low precision, dropout, tied weights, and files: what a training run of a Hugging Face model is made of.

With the same seed and microbatches, numbers are the same bit for bit on any number of devices, however layers are put
into stages and recomputed. Gradients of a tied weight are summed per layer: they equal the plain model's to rounding.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_close_grads, labelled, livened, plain_loss, small, train_call, wrapped
from torch import Tensor, nn

from helpers_adam import NumpyAdamW
from helpers_parity import (
    StalenessReference,
    assert_same,
    assert_same_grads,
    assert_same_state,
    grads_of,
    microbatches,
)
from helpers_slow import slow_except
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.optim import AdamW

transformers = pytest.importorskip("transformers")

BF16, FP32 = torch.bfloat16, torch.float32
DROPOUT: dict[str, dict[str, float]] = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "t5": {"dropout_rate": 0.2},
}
TIED = {"gpt2": "transformer.wte.weight", "t5": "shared.weight", "gemma2": "model.embed_tokens.weight"}


def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return NumpyAdamW(params, lr=0.02)


class Training:
    """A wrapped model with its optimizer."""

    def __init__(self, model: RoundPipe) -> None:
        self.model = model
        self._optimizer = AdamW(model.optim_parameters(), lr=0.02)

    def iterate(self, model_type: str, seed: int, is_async: bool = False) -> Tensor:
        batch = labelled(model_type, seed=seed)
        loss: Tensor = self.model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
        self.model.step(self._step, is_async=is_async)
        return loss

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


# Precision.


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_bfloat16_weights_train_as_in_a_plain_loop_over_float32_masters(model_type: str, is_async: bool) -> None:
    reference = StalenessReference(small(model_type).to(BF16), make_optimizer, FP32)
    with wrapped(small(model_type).to(BF16), optim_dtype=FP32) as model:
        training = Training(model)
        assert {param.dtype for param in model.optim_parameters()} == {FP32}
        for iteration in range(4):
            loss = training.iterate(model_type, iteration, is_async)
            expected = plain_loss(reference.module, labelled(model_type, seed=iteration))
            assert_same(loss, expected, f"loss {iteration}")
            reference.step(is_async)
        model.synchronize()
        reference.synchronize()
        assert_same_state(model, reference.module)
        copies = [param.detach().clone() for param in model.optim_parameters()]
        assert_same(copies, reference.versions[-1], "what weights were rounded from")
        assert any((copy.to(BF16).float() != copy).any() for copy in copies), "nothing was kept beyond bfloat16"


def test_gradients_in_bfloat16_are_those_of_the_plain_model() -> None:
    plain, batch = small("qwen3").to(BF16), labelled("qwen3", 6)
    for num_devices, grain in ((1, "stage"), (3, "layer")):
        expected = copy.deepcopy(plain)
        loss = plain_loss(expected, batch, 3)
        with wrapped(copy.deepcopy(plain), num_devices) as model:
            assert_same(train_call(model, batch, 3, recompute_grain=grain), loss, "loss")
            assert_same_grads(model.original_model, expected)
            assert {grad.dtype for grad in grads_of(model.original_model).values() if grad is not None} == {BF16}


# Dropout.


@pytest.mark.parametrize("model_type", slow_except(("llama", "gpt2"), DROPOUT))
def test_dropout_is_the_same_on_any_number_of_devices_and_however_it_is_recomputed(model_type: str) -> None:
    """Also where nothing is recomputed, since the fused stage has all layers: recomputation draws what forward drew."""

    def run(num_devices: int, **options: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        with wrapped(small(model_type, **DROPOUT[model_type]), num_devices) as model:
            if options.pop("in_one", False):
                options["execute_plan"] = ModelExecutePlan([], [range(model.num_layers)])
            torch.manual_seed(5)
            loss = train_call(model, labelled(model_type, 6), 3, **options)
            return loss, grads_of(model.original_model)

    expected = run(1)
    assert_same(run(2), expected, "two devices")
    assert_same(run(3, recompute_grain="layer"), expected, "three devices, by layer")
    in_one = run(1, in_one=True)
    assert_same(in_one[0], expected[0], "without recomputation")
    for name, grad in in_one[1].items():
        if name not in TIED.values() and "word_embeddings" not in name:
            assert_same(grad, expected[1][name], f"without recomputation, {name}")
    assert (plain_loss(small(model_type), labelled(model_type, 6), 3) - expected[0]).abs() > 0.001, "nothing is dropped"


def test_training_with_dropout_repeats_itself() -> None:
    states = []
    for num_devices in (1, 3):
        with wrapped(small("gpt2", **DROPOUT["gpt2"]).to(BF16), num_devices, optim_dtype=FP32) as model:
            training = Training(model)
            torch.manual_seed(8)
            losses = [training.iterate("gpt2", seed, is_async=seed % 2 == 0) for seed in range(4)]
            model.synchronize()
            states.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
    assert_same(states[1], states[0])


def test_a_call_of_a_new_form_draws_what_every_later_one_draws_with_the_same_seed() -> None:
    """Calibration runs the model, too, but must not draw from the user's generator."""
    batch = labelled("gpt2")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    losses = []
    with wrapped(small("gpt2", **DROPOUT["gpt2"])) as model:
        for _ in range(3):
            torch.manual_seed(4)
            losses.append(train_call(model, batch))
    assert_same(losses[1], losses[2], "calls of a form that is known")
    assert_same(losses[0], losses[2], "the first one")


def test_wrapping_does_not_draw_from_the_users_generator() -> None:
    module = small("gpt2", **DROPOUT["gpt2"])
    before = torch.get_rng_state()
    with wrapped(module):
        assert torch.equal(torch.get_rng_state(), before), "torch's generator has moved on"


def test_dropout_is_off_in_eval_mode_and_on_again_in_train_mode() -> None:
    plain, batch = small("bert", **DROPOUT["bert"]).eval(), labelled("bert")
    with wrapped(small("bert", **DROPOUT["bert"])) as model:
        losses = []
        for mode in (True, False, True, False):
            model.train(mode)
            assert model.original_model.bert.training is mode
            torch.manual_seed(4)
            losses.append(train_call(model, batch))
    assert_same(losses[1::2], [plain_loss(plain, batch)] * 2, "eval mode")
    assert all((loss - losses[1]).abs() > 1e-2 for loss in losses[::2])


# Tied weights.


@pytest.mark.parametrize("model_type", TIED)
def test_a_tied_weight_is_trained_once(model_type: str) -> None:
    """SGD with a large step: a weight stepped twice, or without a part of its gradient, differs clearly."""
    plain, batch = small(model_type), labelled(model_type)
    with wrapped(copy.deepcopy(plain)) as model:
        names = [name for name, _ in model.optim_named_parameters()]
        assert names.count(TIED[model_type]) == 1
        assert len(names) == len(list(plain.parameters())) == len({id(p) for p in model.optim_parameters()})
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=2.0)
        plain_loss(plain, batch)
        torch.optim.SGD(plain.parameters(), lr=2.0).step()
        train_call(model, batch)
        assert_close_grads(model.original_model, plain, 1e-6)
        model.step(optimizer.step, is_async=False)
        ours = model.original_model
        assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), atol=2e-6, rtol=2e-6)


# Files.


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("llama", BF16), ("gpt2", FP32), ("gpt2", BF16), ("t5", FP32)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_from_pretrained_reads_what_save_pretrained_wrote(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with wrapped(small(model_type).to(dtype), optim_dtype=FP32) as model:
        training = Training(model)
        for seed in range(2):
            training.iterate(model_type, seed, is_async=True)  # the last of them is waited for
        model.save_pretrained(tmp_path)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        newest = [param.detach().to(dtype) for param in model.optim_parameters()]
        assert_same([param.detach() for param in model.parameters()], newest, "weights of the last step")
    loaded = type(model.original_model).from_pretrained(tmp_path, dtype="auto")
    assert_same(dict(loaded.state_dict()), saved, "weights")
    assert loaded.config.to_diff_dict() | {"dtype": None} == model.original_model.config.to_diff_dict() | {
        "dtype": None
    }
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert written < 1.2 * sum(param.nbytes for param in loaded.parameters()) + 20_000


def test_a_saved_model_goes_on_training_as_the_wrapped_one(tmp_path: Path) -> None:
    with wrapped(small("llama")) as model:
        Training(model).iterate("llama", 0)
        model.save_pretrained(tmp_path)
        expected = train_call(model, labelled("llama", seed=1))
    with wrapped(transformers.LlamaForCausalLM.from_pretrained(tmp_path).train()) as again:
        assert_same(train_call(again, labelled("llama", seed=1)), expected, "loss")


@pytest.mark.parametrize("model_type", ["llama", "t5"])
def test_state_dicts_go_from_model_to_model(model_type: str) -> None:
    """With the keys of the plain model, tied ones included; the optimizer's copies follow what is loaded."""
    plain = small(model_type)
    with wrapped(small(model_type)) as model:
        Training(model).iterate(model_type, 0)
        trained = copy.deepcopy(model.state_dict())
        assert trained.keys() == plain.state_dict().keys()
        plain.load_state_dict(trained)
        with wrapped(livened(small(model_type), seed=9)) as other:
            training = Training(other)
            training.iterate(model_type, 5)
            other.load_state_dict(trained)
            assert_same(dict(other.state_dict()), dict(trained), "loaded")
            copies = dict(other.optim_named_parameters())
            assert all(torch.equal(copies[name], param) for name, param in plain.named_parameters())
            assert_same(
                train_call(other, labelled(model_type, seed=1)), plain_loss(plain, labelled(model_type, seed=1))
            )
            missing = {name: value for name, value in trained.items() if "norm" not in name}
            with pytest.raises(RuntimeError, match="Missing key"):
                other.load_state_dict(missing)


def test_torch_save_keeps_state_dicts_as_they_are_and_as_large_as_they_are() -> None:
    with wrapped(small("gpt2").to(BF16), optim_dtype=FP32) as model:
        Training(model).iterate("gpt2", 0)
        state, file = model.state_dict(), io.BytesIO()
        torch.save(state, file)
        num_bytes = sum(param.nbytes for param in model.parameters())
        assert len(file.getvalue()) < 1.3 * num_bytes + 20_000
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same(dict(loaded), dict(state))
    fresh = small("gpt2", seed=2).to(BF16)
    fresh.load_state_dict(loaded)
    assert_same_state(fresh, model.original_model)


def test_the_optimizers_state_goes_with_the_weights() -> None:
    """A run that is stopped and continued in a new process equals an uninterrupted run."""
    with wrapped(small("llama").to(BF16), optim_dtype=FP32) as model:
        optimizer = AdamW(model.optim_parameters(), lr=0.02)
        for seed in range(4):
            if seed == 2:
                stopped = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                copies = [param.detach().clone() for param in model.optim_parameters()]
            train_call(model, labelled("llama", seed=seed))
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        expected = copy.deepcopy(dict(model.state_dict()))
    with wrapped(small("llama", seed=4).to(BF16), optim_dtype=FP32) as again:
        again.load_state_dict(stopped[0])
        continued = AdamW(again.optim_parameters(), lr=0.02)
        continued.load_state_dict(stopped[1])
        with torch.no_grad():
            for param, value in zip(again.optim_parameters(), copies, strict=True):
                param.copy_(value)  # what was rounded away in the weights
        for seed in (2, 3):
            train_call(again, labelled("llama", seed=seed))
            again.step(lambda: (continued.step(), continued.zero_grad()), is_async=False)
        assert_same(dict(again.state_dict()), expected)
