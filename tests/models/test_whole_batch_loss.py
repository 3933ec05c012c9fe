"""A model that computes its own loss gives the loss of the whole call, for any number of microbatches and kind of call.

The plain model on the whole batch is what counts. Models whose loss is computed in the dtype of their logits run in
float64 and agree to its rounding; others, whose library computes the loss in float32, agree to that of float32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import (
    IGNORED,
    ROUNDING,
    VOCAB,
    Batch,
    added_loss,
    assert_close_grads,
    labelled,
    livened,
    lora,
    plain_loss,
    ragged,
    small,
    tokens,
    train_call,
    wrapped,
)
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, grads_of, microbatches, split
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

transformers = pytest.importorskip("transformers")

IN_DOUBLE = 1e-12  # of losses and gradients in float64
NUM_ROWS = 10

_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def bert(kind: str, **config: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**_BERT, **config))
    return livened(model.train())


def bart() -> nn.Module:
    torch.manual_seed(1)
    return livened(transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART)).train())


def uneven_labels() -> Tensor:
    """Rows with nine labels to one, and two without any: one microbatch of four or eight has none at all."""
    labels = tokens(NUM_ROWS, 9, seed=9)
    for row in range(NUM_ROWS):
        labels[row, : row % 8] = IGNORED
    labels[6:8] = IGNORED
    return labels


def text(labels: Tensor | None = None, **more: Tensor) -> Batch:
    return {"input_ids": tokens(NUM_ROWS, 9), **({} if labels is None else {"labels": labels}), **more}


def classes(count: int) -> Tensor:
    return torch.arange(NUM_ROWS) % count


def with_ignored(labels: Tensor) -> Tensor:
    labels[3] = labels[8] = IGNORED
    return labels


Case = tuple[Callable[[], nn.Module], Callable[[], Batch]]
COMPUTED_IN_FLOAT: dict[str, Case] = {
    "causal": (lambda: small("llama"), lambda: text(uneven_labels())),
    "causal_tied": (lambda: small("gpt2"), lambda: text(uneven_labels())),
    "causal_with_adapters": (lambda: lora(small("llama")), lambda: text(uneven_labels())),
    "causal_with_experts": (lambda: small("mixtral"), lambda: text(uneven_labels())),
    "shifted_by_the_user": (
        lambda: small("llama"),
        lambda: text(tokens(NUM_ROWS, 9), shift_labels=uneven_labels()),
    ),
    "masked_with_loss_function": (lambda: small("modernbert"), lambda: text(uneven_labels())),
    "decoder_with_loss_function": (lambda: small("t5gemma"), lambda: text(uneven_labels())),
}
COMPUTED_IN_DOUBLE: dict[str, Case] = {
    "masked": (lambda: bert("MaskedLM"), lambda: text(uneven_labels())),
    "tokens": (
        lambda: bert("TokenClassification", num_labels=5),
        lambda: text(torch.where(uneven_labels() < 0, IGNORED, uneven_labels() % 5)),
    ),
    "sequences": (lambda: bert("SequenceClassification", num_labels=4), lambda: text(classes(4))),
    "sequences_some_ignored": (
        lambda: bert("SequenceClassification", num_labels=4),
        lambda: text(with_ignored(classes(4))),
    ),
    "regression": (
        lambda: bert("SequenceClassification", num_labels=1),
        lambda: text(torch.linspace(-1, 2, NUM_ROWS)),
    ),
    "several_classes": (
        lambda: bert("SequenceClassification", num_labels=4, problem_type="multi_label_classification"),
        lambda: text((tokens(NUM_ROWS, 4) % 2).float()),
    ),
    "questions": (
        lambda: bert("QuestionAnswering"),
        lambda: text(start_positions=classes(9), end_positions=classes(7)),
    ),
    "t5": (lambda: small("t5"), lambda: text(uneven_labels())),
    "bart": (bart, lambda: text(uneven_labels())),
    "images": (lambda: small("vit"), lambda: labelled("vit", NUM_ROWS)),
}


def whole(plain: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model on the whole batch."""
    loss = plain(**batch).loss
    loss.backward()
    return loss.detach(), {name: grad for name, grad in grads_of(plain).items() if grad is not None}


def run_all_ways(model: RoundPipe, batch: Batch) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    """(loss, gradients) of forward_backward and of forward; the loss in its outputs must be the same number."""
    found = []
    loss, outputs = model.forward_backward(input_kwargs=batch, return_outputs=True)
    assert_same(outputs.loss.detach(), loss, "outputs.loss")
    model.synchronize()
    found.append((loss, grads_of(model.original_model)))
    model.zero_grad()
    output = model(**batch).loss
    output.backward()
    model.synchronize()
    found.append((output.detach(), grads_of(model.original_model)))
    model.zero_grad()
    return found


def assert_close(found: tuple[Tensor, Any], expected: tuple[Tensor, Any], tolerance: float) -> None:
    """Assert equality relative to the loss and to the largest gradient."""
    torch.testing.assert_close(found[0], expected[0], atol=0.0, rtol=tolerance)
    largest = max(float(grad.abs().max()) for grad in expected[1].values())
    for name, grad in expected[1].items():
        assert found[1][name] is not None, name
        torch.testing.assert_close(found[1][name], grad, atol=tolerance * largest, rtol=0.0)


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize(("build", "make_batch"), COMPUTED_IN_DOUBLE.values(), ids=COMPUTED_IN_DOUBLE)
def test_loss_and_gradients_are_those_of_the_whole_batch(
    build: Callable[[], nn.Module], make_batch: Callable[[], Batch], num_devices: int
) -> None:
    plain, batch = build().double(), make_batch()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    expected = whole(plain, batch)
    with wrapped(copy.deepcopy(plain), num_devices) as model:
        model.zero_grad()
        fused, unfused = run_all_ways(model, batch)
        with torch.no_grad():
            evaluated = model(**batch).loss
    assert_same(unfused, fused, "forward() and backward()")
    assert_close(fused, expected, IN_DOUBLE)
    torch.testing.assert_close(evaluated, expected[0], atol=0.0, rtol=IN_DOUBLE)


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize(("build", "make_batch"), COMPUTED_IN_FLOAT.values(), ids=COMPUTED_IN_FLOAT)
def test_loss_and_gradients_in_float_are_those_of_the_whole_batch(
    build: Callable[[], nn.Module], make_batch: Callable[[], Batch], num_devices: int
) -> None:
    plain, batch = build(), make_batch()
    expected = whole(plain, batch)
    with wrapped(copy.deepcopy(plain), num_devices) as model:
        model.zero_grad()
        fused, unfused = run_all_ways(model, batch)
        with torch.no_grad():
            evaluated = model(**batch, roundpipe_run_config=RoundPipeRunConfig(keep_logits=False))
    assert_same(unfused, fused, "forward() and backward()")
    assert_close(fused, expected, ROUNDING)
    torch.testing.assert_close(evaluated.loss, expected[0], atol=0.0, rtol=ROUNDING)


def as_one_layer(model: nn.Module) -> Any:
    return RoundPipe(model, devices=["cpu"] * 3)


def part_by_part(model: nn.Module) -> Any:
    return wrap_model_to_roundpipe(model, False, devices=["cpu"] * 3)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "modernbert", "t5"])
@pytest.mark.parametrize("wrap", [as_one_layer, part_by_part])
def test_a_model_that_is_not_split_gives_the_same_loss(wrap: Callable[[nn.Module], Any], model_type: str) -> None:
    plain, batch = small(model_type), ragged(model_type)
    batch |= {} if model_type == "modernbert" else {"use_cache": False}
    expected = whole(plain, batch)
    with wrap(copy.deepcopy(plain)) as model:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        model.synchronize()
        torch.testing.assert_close(loss.detach(), expected[0], atol=0.0, rtol=ROUNDING)
        assert_close_grads(model, plain, ROUNDING)


def test_arguments_by_position_are_counted_too() -> None:
    plain, batch = small("llama", use_cache=False), ragged("llama")
    given = (batch["input_ids"], None, None, None, None, batch["labels"])
    with as_one_layer(copy.deepcopy(plain)) as model:
        loss = model.forward_backward(given)
        torch.testing.assert_close(loss, plain(**batch).loss.detach(), atol=0.0, rtol=1e-6)


def test_a_tuple_has_the_loss_of_the_whole_batch_in_front() -> None:
    plain, batch = small("llama"), ragged("llama")
    expected = plain(**batch).loss.detach()
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss, logits = model(**batch, return_dict=False)
        torch.testing.assert_close(loss.detach(), expected, atol=0.0, rtol=1e-6)
        assert logits.shape == (6, 9, VOCAB)
        assert_same(model.forward_backward(input_kwargs={**batch, "return_dict": False}), loss.detach())


# The option whole_batch_loss.


def test_with_equally_many_labels_in_each_row_it_is_the_plain_loop_weighed_by_rows() -> None:
    plain, batch = small("llama"), labelled("llama", 5)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(train_call(model, batch, 3), plain_loss(plain, batch, 3), "loss")
        assert_same_grads(model.original_model, plain)


def test_without_whole_batch_loss_each_microbatch_has_its_own_mean() -> None:
    plain, batch = small("llama"), ragged("llama")
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss = train_call(model, batch, 4, whole_batch_loss=False)
        assert_same(loss, added_loss(plain, batch, 4), "loss")
        assert_same_grads(model.original_model, plain)
        config = RoundPipeRunConfig(whole_batch_loss=False, num_microbatch=4)
        assert_same(model(**batch, roundpipe_run_config=config).loss.detach(), loss, "forward()")
        assert (loss / 4 - train_call(model, batch, 4)).abs() > 1e-3, "it would be equal"


def test_with_a_loss_fn_each_microbatch_has_its_own_mean_unless_whole_batch_loss_is_on() -> None:
    plain, batch = small("llama"), ragged("llama")
    with wrapped(copy.deepcopy(plain), 3) as model:
        added = added_loss(plain, batch, 4)
        for switch, expected, in_outputs in (
            ({}, added, added / 4),  # an output like any other: averaged
            ({"whole_batch_loss": True}, plain(**batch).loss.detach(), plain(**batch).loss.detach()),
            ({"loss_reduction": "mean"}, plain_loss(plain, batch, 4), plain_loss(plain, batch, 4)),
        ):
            config = RoundPipeRunConfig(**switch, num_microbatch=4)
            loss, outputs = model.forward_backward(
                input_kwargs=batch, loss_fn=lambda output, _: output.loss, return_outputs=True, run_config=config
            )
            torch.testing.assert_close(loss, expected, atol=0.0, rtol=1e-6)
            torch.testing.assert_close(outputs.loss.detach(), in_outputs, atol=0.0, rtol=1e-6)


def test_whole_batch_loss_can_be_set_for_all_calls_of_a_model() -> None:
    plain, batch = small("llama"), ragged("llama")
    with wrapped(copy.deepcopy(plain), model_run_config=RoundPipeRunConfig(whole_batch_loss=False)) as model:
        assert_same(train_call(model, batch), added_loss(plain, batch), "loss")
        loss = train_call(model, batch, whole_batch_loss=True)
        torch.testing.assert_close(loss, plain(**batch).loss.detach(), atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("switch", [None, True, False])
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_call_without_labels_has_no_loss_and_raises_nothing(model_type: str, switch: bool | None) -> None:
    plain, batch = small(model_type), {"input_ids": tokens(5, 7)}
    config = RoundPipeRunConfig(whole_batch_loss=switch)
    with wrapped(copy.deepcopy(plain)) as model:
        output = model(**batch, roundpipe_run_config=config)
        assert output.loss is None
        loss, _ = model.forward_backward(
            input_kwargs=batch, loss_fn=lambda out, _: out.logits.mean(), return_outputs=True, run_config=config
        )
        expected = sum(plain(**piece).logits.mean() for piece in split(batch, 3))
        torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=1e-5)
        with pytest.raises(TypeError, match=r"there is no loss in the .*give the model labels"):
            model.forward_backward(input_kwargs=batch, run_config=config)


# Trials: neither the values of the first batch nor the weights decide how a run is weighed.


def ignored_in_front(labels: Tensor) -> None:
    labels[0, :4] = IGNORED


def repeated(labels: Tensor) -> None:
    labels[0, :4] = labels[0, 0]


def a_row_ignored(labels: Tensor) -> None:
    labels[0] = IGNORED


def one_class(labels: Tensor) -> None:
    labels[:] = 1


FIRST_LABELS = [ignored_in_front, repeated, a_row_ignored, one_class]
LABELLED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "t5": (lambda: small("t5"), VOCAB),
    "bart": (bart, VOCAB),
    "masked": (lambda: bert("MaskedLM"), VOCAB),
    "tokens": (lambda: bert("TokenClassification", num_labels=5), 5),
    "two_classes": (lambda: bert("TokenClassification", num_labels=2), 2),
}


@pytest.mark.parametrize("change", FIRST_LABELS)
@pytest.mark.parametrize(
    ("build", "num_classes"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name not in ("t5", "tokens") else [])
        for name, case in LABELLED.items()
    ],
)
def test_the_first_batch_does_not_decide_how_a_run_is_weighed(
    build: Callable[[], nn.Module], num_classes: int, change: Callable[[Tensor], None]
) -> None:
    plain = build().double()
    first = tokens(NUM_ROWS, 9, seed=9) % num_classes
    change(first)
    second = torch.where(uneven_labels() < 0, IGNORED, uneven_labels() % num_classes)
    with wrapped(copy.deepcopy(plain), 2) as model:
        for labels in (first, second):
            plain.zero_grad()
            model.zero_grad()
            expected = whole(plain, text(labels))
            loss = model.forward_backward(input_kwargs=text(labels))
            model.synchronize()
            assert_close((loss, grads_of(model.original_model)), expected, IN_DOUBLE)


def test_a_model_whose_outputs_are_all_alike_is_weighed_by_labels() -> None:
    """With a head of zeros every label has the same loss, at first."""
    plain = small("t5").double()
    nn.init.zeros_(plain.lm_head.weight)
    batch = text(uneven_labels())
    expected = whole(plain, batch)
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss = model.forward_backward(input_kwargs=batch)
        model.synchronize()
        assert_close((loss, grads_of(model.original_model)), expected, IN_DOUBLE)


def test_start_and_end_positions_in_a_tuple_have_the_loss_of_the_whole_batch() -> None:
    plain = bert("QuestionAnswering").double()
    batch = text(start_positions=classes(9), end_positions=classes(7))
    expected = plain(**batch).loss.detach()
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss, *_ = model(**batch, return_dict=False)
        torch.testing.assert_close(loss.detach(), expected, atol=0.0, rtol=IN_DOUBLE)
        assert_same(model.forward_backward(input_kwargs={**batch, "return_dict": False}), loss.detach())


# Losses that do not add up over rows.


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=12,
    )
    torch.manual_seed(1)
    return livened(transformers.CLIPModel(config).train())


def pairs_of_images_and_texts() -> Batch:
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens(6, 7), "pixel_values": images, "return_loss": True}


def messages_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("fused", [False, True])
def test_a_contrastive_loss_is_warned_of_once_and_exact_in_one_microbatch(
    caplog: pytest.LogCaptureFixture, fused: bool
) -> None:
    plain, batch = clip(), pairs_of_images_and_texts()
    expected = plain(**batch).loss.detach()
    with wrapped(copy.deepcopy(plain), 2) as model:

        def loss_in(num_microbatch: int) -> Tensor:
            config = microbatches(num_microbatch)
            if fused:
                return model.forward_backward(input_kwargs=batch, run_config=config)
            return model(**batch, roundpipe_run_config=config).loss.detach()

        torch.testing.assert_close(loss_in(1), expected, atol=0.0, rtol=1e-6)
        assert messages_of(caplog) == []
        assert (loss_in(2) - expected).abs() > 0.1
        loss_in(3)
    (message,) = messages_of(caplog)
    assert "for two rows together" in message
    assert "num_microbatch=1" in message


ORDINARY: dict[str, Case] = {
    "causal": (lambda: small("llama", attention_dropout=0.2), lambda: text(uneven_labels())),
    "routed": (lambda: small("mixtral", output_router_logits=True), lambda: text(uneven_labels())),
    "masked": (lambda: bert("MaskedLM"), lambda: text(uneven_labels())),
    "sequences": COMPUTED_IN_DOUBLE["sequences"],
    "regression": COMPUTED_IN_DOUBLE["regression"],
    "questions": COMPUTED_IN_DOUBLE["questions"],
    "t5": (lambda: small("t5", dropout_rate=0.2), lambda: text(uneven_labels())),
    "in_low_precision": (lambda: small("t5").to(torch.bfloat16), lambda: text(uneven_labels())),
    "images": COMPUTED_IN_DOUBLE["images"],
}


@pytest.mark.parametrize(("build", "make_batch"), ORDINARY.values(), ids=ORDINARY)
def test_ordinary_models_are_not_warned_of(
    build: Callable[[], nn.Module], make_batch: Callable[[], Batch], caplog: pytest.LogCaptureFixture
) -> None:
    batch = make_batch()
    with wrapped(build(), 3, optim_dtype=torch.float32) as model:
        model.forward_backward(input_kwargs=batch)
        model(**batch)
        model.synchronize()
    assert messages_of(caplog) == []


# Which labels count.


def test_how_labels_are_counted_is_not_learned_from_an_ambiguous_batch() -> None:
    """In the first call no row begins with a label: shifted or not, as many count. In the second one all rows do."""
    plain = small("modernbert")
    first, second = labelled("modernbert", 2, 7), labelled("modernbert", 2, 7)
    first["labels"][:, 0] = IGNORED
    with wrapped(copy.deepcopy(plain)) as model:
        for batch in (first, second):
            expected = plain(**batch).loss.detach()
            torch.testing.assert_close(train_call(model, batch), expected, atol=0.0, rtol=1e-6)


def test_a_small_batch_with_a_single_label_is_counted() -> None:
    plain, batch = small("llama"), labelled("llama", 2, 7)
    batch["labels"][:] = IGNORED
    batch["labels"][1, 3] = 5
    with wrapped(copy.deepcopy(plain)) as model:
        torch.testing.assert_close(train_call(model, batch), plain(**batch).loss.detach(), atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_call_without_any_label_that_counts_is_nan_as_in_the_plain_model(model_type: str) -> None:
    plain, batch = small(model_type), labelled(model_type)
    batch["labels"][:] = IGNORED
    assert plain(**batch).loss.isnan()
    with wrapped(copy.deepcopy(plain)) as model:
        assert train_call(model, batch).isnan()


def masked_mean(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """A mean whose gradient is NaN where nothing counts, unlike that of torch's cross entropy."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    mask = (labels != IGNORED).flatten()
    return (losses * mask).sum() / mask.sum()


def test_a_microbatch_without_labels_adds_nothing_even_where_its_loss_is_nan() -> None:
    plain, batch = small("llama"), labelled("llama", 4)
    plain.loss_function = masked_mean
    batch["labels"][1] = IGNORED
    expected = whole(plain, batch)
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss = train_call(model, batch, 4)
        assert_close((loss, grads_of(model.original_model)), expected, ROUNDING)


def test_a_loss_function_set_after_wrapping_is_weighed_as_it_counts() -> None:
    """The library's shifts labels, the other one does not."""
    plain, batch = small("llama"), ragged("llama")
    with wrapped(copy.deepcopy(plain), 3) as model:
        train_call(model, batch, 4)
        for either in (plain, model):
            either.loss_function = masked_mean
        torch.testing.assert_close(train_call(model, batch, 4), plain(**batch).loss.detach(), atol=0.0, rtol=1e-6)


# Over several calls.


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["number", "tensor"])
def test_num_items_in_batch_given_by_the_user_goes_to_every_microbatch(kind: Any) -> None:
    plain, batch = small("llama"), ragged("llama")
    batch["num_items_in_batch"] = kind(50)
    with wrapped(copy.deepcopy(plain)) as model:
        loss = train_call(model, batch)
        assert_same(loss, added_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
        assert_same(model(**batch, roundpipe_run_config=microbatches(2)).loss.detach(), loss, "forward()")


def num_labels(batch: Batch, model_type: str) -> int:
    labels = batch["labels"] if model_type in ("bert", "t5") else batch["labels"][:, 1:]
    return int((labels != IGNORED).sum())


@pytest.mark.parametrize("num_microbatch", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("model_type", ["llama", "bert", "t5"])
def test_calls_with_the_number_of_all_their_labels_add_up_to_one_batch(model_type: str, num_microbatch: int) -> None:
    """Also where the loss of the model does not take that number."""
    plain, batches = small(model_type), [ragged(model_type, 6, seed=seed) for seed in (1, 2)]
    batches.append(ragged(model_type, 3, seed=3))
    together = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = whole(plain, together)
    count = num_labels(together, model_type)
    with wrapped(copy.deepcopy(plain), 3) as model:
        losses = [train_call(model, {**batch, "num_items_in_batch": count}, num_microbatch) for batch in batches]
        assert_close((sum(losses), grads_of(model.original_model)), expected, ROUNDING)


# Experts.


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def routed_loss(plain: nn.Module, pieces: list[Batch], count: int, num_rows: int) -> Tensor:
    """Over all counted labels, and the router's loss by rows; gradients are where autograd leaves them."""
    total = torch.zeros(())
    for piece in pieces:
        share = len(piece["labels"]) / num_rows
        output = plain(**piece, num_items_in_batch=count)
        routers = plain.router_aux_loss_coef * output.aux_loss
        loss = output.loss - routers + share * routers
        loss.backward()
        total += loss.detach()
    return total


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("num_microbatch", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_loss_of_routers_is_weighed_by_rows(model_type: str, num_microbatch: int) -> None:
    plain, batch = small(model_type, **ROUTED), ragged(model_type)
    expected = routed_loss(plain, split(batch, num_microbatch), num_labels(batch, model_type), 6)
    config = microbatches(num_microbatch)
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss, outputs = model.forward_backward(input_kwargs=batch, return_outputs=True, run_config=config)
        model.synchronize()
        assert_close((loss, grads_of(model.original_model)), (expected, grads_of(plain)), ROUNDING)
        assert_same(outputs.loss.detach(), loss)
        assert_same(model(**batch, roundpipe_run_config=config).loss.detach(), loss, "forward()")


def test_the_loss_of_routers_counts_once_over_several_calls() -> None:
    """By the share of each call in the labels of all, and within a call by rows."""
    plain, batches = small("mixtral", **ROUTED), [ragged("mixtral", 6, seed=1), ragged("mixtral", 3, seed=2)]
    counts = [num_labels(batch, "mixtral") for batch in batches]
    plain.zero_grad()
    expected = torch.zeros(())
    for batch, count in zip(batches, counts, strict=True):
        for piece in split(batch, 3):
            share = len(piece["labels"]) / len(batch["labels"]) * count / sum(counts)
            output = plain(**piece, num_items_in_batch=sum(counts))
            routers = plain.router_aux_loss_coef * output.aux_loss
            (output.loss - routers + share * routers).backward()
            expected += (output.loss - routers + share * routers).detach()
    with wrapped(copy.deepcopy(plain), 2) as model:
        model.zero_grad()
        losses = [train_call(model, {**batch, "num_items_in_batch": sum(counts)}, 3) for batch in batches]
        assert_close((sum(losses), grads_of(model.original_model)), (expected, grads_of(plain)), ROUNDING)


def test_a_call_that_turns_the_loss_of_routers_on_is_examined_again() -> None:
    plain, batch = small("mixtral", router_aux_loss_coef=0.3), ragged("mixtral")
    with wrapped(copy.deepcopy(plain), 3) as model:
        torch.testing.assert_close(train_call(model, batch, 4), plain(**batch).loss.detach(), atol=0.0, rtol=1e-6)
        routed = {**batch, "output_router_logits": True}
        expected = routed_loss(plain, split(routed, 4), num_labels(batch, "mixtral"), 6)
        torch.testing.assert_close(train_call(model, routed, 4), expected, atol=0.0, rtol=1e-6)
