"""Inputs for calibration: the first tokens of a call's inputs, or inputs made up from a config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.split.splitter import cut_down, made_up


def ids(num_rows: int = 5, num_tokens: int = 20) -> Tensor:
    return torch.arange(num_rows * num_tokens).view(num_rows, num_tokens)


def test_the_first_tokens_of_the_first_rows_are_kept() -> None:
    kwargs = {"input_ids": ids(), "labels": ids(), "inputs_embeds": torch.rand(5, 20, 4), "use_cache": False}
    small = cut_down(kwargs)
    assert small is not None
    assert torch.equal(small["input_ids"], ids()[:2, :8])
    assert torch.equal(small["inputs_embeds"], kwargs["inputs_embeds"][:2, :8])
    assert small["use_cache"] is False
    assert small.keys() == kwargs.keys()
    assert kwargs["input_ids"].shape == (5, 20)


def test_ignored_labels_are_replaced_by_labels_that_count() -> None:
    labels = torch.full((4, 20), -100)
    labels[:, -1] = 3
    small = cut_down({"input_ids": ids(4), "labels": labels})
    assert small is not None
    assert (small["labels"] >= 0).all()
    assert (labels[:, 0] == -100).all()


def test_the_attention_mask_of_a_padded_beginning_is_set_to_ones() -> None:
    mask = torch.ones(4, 20, dtype=torch.long)
    mask[:, :12] = 0
    small = cut_down({"input_ids": ids(4), "attention_mask": mask})
    assert small is not None
    assert small["attention_mask"].all()
    assert not mask[:, 0].any()


def test_labels_of_rows_keep_one_number_for_each() -> None:
    small = cut_down({"input_ids": ids(), "labels": torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5])})
    assert small is not None
    assert torch.equal(small["labels"], torch.tensor([0.5, 1.5]))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"input_ids": ids(), "pixel_values": torch.rand(5, 3, 8, 8)},
        {"input_ids": ids(), "position_ids": ids(1)},
        {"input_ids": ids(2, 8), "labels": ids(2, 8)},
        {"input_ids": ids(1, 3)},
        {"flag": True},
        {},
    ],
    ids=["unknown input", "rows differ", "small already", "smaller", "no tensor", "nothing"],
)
def test_inputs_that_cannot_or_need_not_be_cut_give_none(kwargs: dict[str, Any]) -> None:
    assert cut_down(kwargs) is None


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)


class Text(Model):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False) -> None: ...


class Seq2Seq(Model):
    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor | None = None) -> None: ...


class Images(Model):
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> None: ...


class Unlabelled(Model):
    def forward(self, input_ids: Tensor) -> None: ...


class Open(Model):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> None: ...


class Other(Model):
    def forward(self, x: Tensor) -> None: ...


def test_a_language_model_is_tried_with_labels_first_and_without_last() -> None:
    guesses = list(made_up(Text(vocab_size=50)))
    assert [sorted(guess) for guess in guesses] == [["input_ids", "labels", "use_cache"]] * 2 + [
        ["input_ids", "use_cache"]
    ]
    assert all(guess["use_cache"] is False for guess in guesses)
    assert torch.equal(guesses[0]["labels"], guesses[0]["input_ids"])
    assert guesses[1]["labels"].shape == (2,)


def test_tokens_are_in_the_vocabulary_and_not_special() -> None:
    config = {"vocab_size": 10, "pad_token_id": 0, "image_token_index": 3, "num_layers": 5}
    found = set(next(made_up(Text(**config)))["input_ids"].flatten().tolist())
    assert found == {1, 2, 4, 5, 6, 7, 8, 9}


def test_the_vocabulary_may_be_that_of_the_text_part() -> None:
    config = {"text_config": SimpleNamespace(vocab_size=6, bos_token_id=1), "image_token_id": 2}
    found = set(next(made_up(Text(**config)))["input_ids"].flatten().tolist())
    assert found == {0, 3, 4, 5}


@pytest.mark.parametrize("config", [{}, {"vocab_size": "many"}, {"vocab_size": 1}])
def test_without_a_vocabulary_there_are_still_tokens(config: dict[str, Any]) -> None:
    assert next(made_up(Text(**config)))["input_ids"].shape == (2, 8)


def test_a_model_without_config_is_tried_too() -> None:
    class Bare(nn.Module):
        def forward(self, input_ids: Tensor) -> None: ...

    assert [sorted(guess) for guess in made_up(Bare())] == [["input_ids"]]


def test_an_encoder_and_decoder_get_tokens_each() -> None:
    first = next(made_up(Seq2Seq(vocab_size=9)))
    assert sorted(first) == ["decoder_input_ids", "input_ids", "labels"]
    assert first["decoder_input_ids"].data_ptr() != first["input_ids"].data_ptr()


@pytest.mark.parametrize(("config", "shape"), [({"image_size": 8}, (2, 3, 8, 8)), ({}, (2, 3, 32, 32))])
def test_images_have_the_size_the_config_says(config: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert next(made_up(Images(**config)))["pixel_values"].shape == shape
    wide = next(made_up(Images(image_size=[4, 6], num_channels=1)))["pixel_values"]
    assert wide.shape == (2, 1, 4, 6)


def test_a_model_that_takes_any_keyword_is_tried_with_labels() -> None:
    assert sorted(next(made_up(Open()))) == ["input_ids", "labels"]
    assert [sorted(guess) for guess in made_up(Unlabelled())] == [["input_ids"]]


def test_no_inputs_are_made_up_for_unknown_parameters() -> None:
    assert list(made_up(Other())) == []
