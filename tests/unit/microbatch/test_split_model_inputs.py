"""split_model_inputs splits inputs by their names and shapes.

Every entry of an item holds the number of the item, so tests can see which items a microbatch got.
"""

from __future__ import annotations

import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe.errors import SplitError
from roundpipe.microbatch import Replicate, RoundPipePackedData, split_call
from roundpipe.microbatch.hf_inputs import ModelInputSplit, split_model_inputs

IMAGE, VIDEO, AUDIO, WORD = 1, 2, 3, 7
CONFIG = SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO, audio_token_index=AUDIO)


def text(*samples: list[int]) -> Tensor:
    """Return token ids, padded with word tokens."""
    length = max(map(len, samples))
    return torch.tensor([sample + [WORD] * (length - len(sample)) for sample in samples])


def numbered(*counts: int, features: int = 2) -> Tensor:
    """Return `counts[i]` entries for item i, each filled with i."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None].expand(-1, features)


def items_in(microbatches: list[dict[str, Any]], name: str) -> list[list[int] | None]:
    """Return the item numbers of the entries in each microbatch; None if the input is missing."""
    return [part[name].flatten(1)[:, 0].tolist() if name in part else None for part in microbatches]


def shapes_in(microbatches: list[dict[str, Any]], name: str) -> list[tuple[int, ...]]:
    return [tuple(part[name].shape) for part in microbatches]


class TestOneMicrobatch:
    def test_num_microbatch_1_accepts_any_inputs(self) -> None:
        kwargs = {"input_ids": torch.zeros(4, 3), "pixel_values": torch.zeros(7, 2), "cu_seq_lens_q": torch.arange(3)}
        (whole,) = split_model_inputs(kwargs, 1, None)
        assert whole == kwargs
        assert whole is not kwargs

    def test_a_packed_batch_is_one_microbatch(self) -> None:
        kwargs = {
            "input_ids": torch.zeros(1, 9, dtype=torch.long),
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]]),
            "cu_seq_lens_q": torch.tensor([0, 3, 5, 9]),
            "cu_seq_lens_k": torch.tensor([0, 3, 5, 9]),
            "max_length_q": 4,
            "pixel_values": torch.zeros(12, 2),
            "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
        }
        assert split_model_inputs(kwargs, 4, CONFIG) == [kwargs]

    def test_without_tensors_there_is_one_microbatch(self) -> None:
        assert split_model_inputs({"use_cache": False}, 3, None) == [{"use_cache": False}]


class TestRows:
    def test_rows_are_split_like_tensor_split(self) -> None:
        ids = torch.arange(14).view(7, 2)
        parts = split_model_inputs({"input_ids": ids, "labels": ids + 1}, 3, None)
        for part, expected in zip(parts, ids.tensor_split(3), strict=True):
            assert torch.equal(part["input_ids"], expected)
            assert torch.equal(part["labels"], expected + 1)

    def test_no_microbatch_is_empty(self) -> None:
        parts = split_model_inputs({"input_ids": torch.zeros(3, 2)}, 8, None)
        assert shapes_in(parts, "input_ids") == [(1, 2)] * 3

    def test_pieces_are_views(self) -> None:
        embeds = torch.zeros(4, 3, requires_grad=True)
        parts = split_model_inputs({"inputs_embeds": embeds}, 2, None)
        assert parts[1]["inputs_embeds"]._base is embeds

    def test_values_without_rows_are_replicated(self) -> None:
        same = {
            "use_cache": False,
            "past_key_values": None,
            "num_items_in_batch": torch.tensor(40),
            "attention_mask": torch.zeros(1, 1, 5, 5),
            "position_ids": torch.arange(5)[None],
            "logits_to_keep": torch.arange(4),
            "vision_feature_layer": [-2, -1, 3, 4],
        }
        for part in split_model_inputs({"input_ids": torch.zeros(4, 5), **same}, 2, None):
            assert all(part[name] is value for name, value in same.items() if name != "vision_feature_layer")
            assert part["vision_feature_layer"] == [-2, -1, 3, 4]

    @pytest.mark.parametrize("num_axes", [3, 4])
    def test_position_ids_with_axes_first_are_split_along_dim_1(self, num_axes: int) -> None:
        positions = torch.arange(num_axes * 3 * 5).view(num_axes, 3, 5)
        parts = split_model_inputs({"input_ids": torch.zeros(3, 5), "position_ids": positions}, 2, None)
        assert torch.equal(parts[0]["position_ids"], positions[:, :2])
        assert torch.equal(parts[1]["position_ids"], positions[:, 2:])

    def test_position_ids_of_one_row_are_replicated(self) -> None:
        positions = torch.zeros(3, 1, 5)
        for part in split_model_inputs({"input_ids": torch.zeros(3, 5), "position_ids": positions}, 3, None):
            assert part["position_ids"] is positions

    def test_without_text_the_shared_first_dimension_is_the_batch(self) -> None:
        parts = split_model_inputs({"pixel_values": torch.zeros(5, 3, 4, 4), "labels": torch.arange(5)}, 2, None)
        assert shapes_in(parts, "pixel_values") == [(3, 3, 4, 4), (2, 3, 4, 4)]
        assert shapes_in(parts, "labels") == [(3,), (2,)]

    def test_one_image_per_sample_needs_no_placeholders(self) -> None:
        kwargs = {"input_ids": torch.full((4, 3), WORD), "pixel_values": numbered(1, 1, 1, 1)}
        for config in (None, CONFIG):
            assert items_in(split_model_inputs(kwargs, 2, config), "pixel_values") == [[0, 1], [2, 3]]


class TestContainers:
    def test_a_list_of_labels_is_split_by_sample(self) -> None:
        labels = [{"boxes": torch.full((3, 4), float(index))} for index in range(3)]  # as many boxes as samples
        parts = split_model_inputs({"pixel_values": torch.zeros(3, 3, 4, 4), "labels": labels}, 2, None)
        assert [part["labels"] for part in parts] == [labels[:2], labels[2:]]

    def test_a_list_of_tensors_of_different_lengths_is_split_by_sample(self) -> None:
        masks = [torch.zeros(2, 4, 4), torch.zeros(5, 4, 4)]
        parts = split_model_inputs({"pixel_values": torch.zeros(2, 3, 4, 4), "segments": masks}, 2, None)
        assert [part["segments"] for part in parts] == [[masks[0]], [masks[1]]]

    def test_tensors_inside_containers_are_split_by_rows(self) -> None:
        states, mask = torch.arange(6.0).view(3, 2), torch.zeros(1, 1, 5, 5)
        kwargs = {"input_ids": torch.zeros(3, 5), "encoder_outputs": (states,), "attention_mask": {"full": mask}}
        parts = split_model_inputs(kwargs, 2, None)
        assert torch.equal(parts[1]["encoder_outputs"][0], states[2:])
        assert parts[1]["attention_mask"]["full"] is mask


class TestGrids:
    def test_patches_go_with_the_sample_that_has_the_placeholders(self) -> None:
        grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4]])
        ids = text([IMAGE] * 1 + [WORD] + [IMAGE] * 2, [WORD], [IMAGE] * 4)  # four patches per token
        kwargs = {"input_ids": ids, "pixel_values": numbered(4, 8, 16), "image_grid_thw": grid}
        parts = split_model_inputs(kwargs, 3, CONFIG)
        assert items_in(parts, "pixel_values") == [[0] * 4 + [1] * 8, None, [2] * 16]
        assert torch.equal(parts[0]["image_grid_thw"], grid[:2])
        assert parts[1].keys() == {"input_ids"}

    def test_with_as_many_images_as_samples_one_sample_may_have_two(self) -> None:
        grid = torch.tensor([[1, 1, 2], [1, 1, 1], [1, 1, 3]])
        ids = text([WORD], [IMAGE] * 3, [IMAGE] * 3)
        kwargs = {"input_ids": ids, "pixel_values": numbered(2, 1, 3), "image_grid_thw": grid}
        assert items_in(split_model_inputs(kwargs, 3, CONFIG), "pixel_values") == [None, [0, 0, 1], [2, 2, 2]]

    def test_images_and_videos_are_assigned_separately(self) -> None:
        kwargs = {
            "input_ids": text([VIDEO] * 8, [IMAGE] * 2 + [VIDEO] * 4 + [IMAGE], [WORD]),
            "pixel_values": numbered(2, 1),
            "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1]]),
            "pixel_values_videos": numbered(8, 4),
            "video_grid_thw": torch.tensor([[2, 2, 2], [1, 2, 2]]),
            "second_per_grid_ts": [0.5, 1.0],
        }
        parts = split_model_inputs(kwargs, 2, CONFIG)
        assert items_in(parts, "pixel_values") == [[0, 0, 1], None]
        assert items_in(parts, "pixel_values_videos") == [[0] * 8 + [1] * 4, None]
        parts = split_model_inputs(kwargs, 3, CONFIG)
        assert items_in(parts, "pixel_values") == [None, [0, 0, 1], None]
        assert items_in(parts, "pixel_values_videos") == [[0] * 8, [1] * 4, None]
        assert [part.get("second_per_grid_ts") for part in parts] == [[0.5], [1.0], None]

    def test_each_image_may_have_its_own_merge_size(self) -> None:
        kwargs = {
            "input_ids": text([IMAGE] * (4 + 2), [IMAGE] * 4, [WORD]),
            "pixel_values": numbered(4, 8, 4),
            "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]]),
            "image_merge_sizes": torch.tensor([1, 2, 1]),
        }
        parts = split_model_inputs(kwargs, 3, CONFIG)
        assert items_in(parts, "pixel_values") == [[0] * 4 + [1] * 8, [2] * 4, None]
        assert [part["image_merge_sizes"].tolist() for part in parts[:2]] == [[1, 2], [1]]

    def test_all_images_may_be_side_by_side_in_one_picture(self) -> None:
        width = numbered(2 * 3, 4 * 3, features=1).T.expand(1, 3, 3, -1)  # patches of 3 x 3, two and four of them
        kwargs = {
            "input_ids": text([WORD], [IMAGE], [IMAGE] * 2),
            "pixel_values": width,
            "target_sizes": torch.tensor([[1, 2], [2, 2]]),
        }
        parts = split_model_inputs(kwargs, 3, CONFIG)
        assert "pixel_values" not in parts[0]
        assert [part["pixel_values"].shape for part in parts[1:]] == [(1, 3, 3, 6), (1, 3, 3, 12)]
        assert parts[2]["pixel_values"].unique().tolist() == [1]

    def test_without_text_each_image_is_a_sample(self) -> None:
        grid = torch.tensor([[1, 1, 2], [1, 1, 1], [1, 1, 3]])
        kwargs = {"pixel_values": numbered(2, 1, 3), "image_grid_thw": grid, "labels": torch.arange(3)}
        parts = split_model_inputs(kwargs, 2, None)
        assert items_in(parts, "pixel_values") == [[0, 0, 1], [2, 2, 2]]
        assert [part["labels"].tolist() for part in parts] == [[0, 1], [2]]

    @pytest.mark.parametrize("seed", range(20))
    def test_random_layouts_are_assigned_correctly(self, seed: int) -> None:
        draw = random.Random(seed)
        layout = [
            [(1, 2 * draw.randint(1, 3), 2 * draw.randint(1, 3)) for _ in range(draw.randint(0, 3))] for _ in "1234"
        ]
        layout[draw.randrange(4)].append((2, 2, 2))
        grid = torch.tensor([item for sample in layout for item in sample])
        ids = text(*([IMAGE] * sum(t * h * w // 4 for t, h, w in sample) + [WORD] for sample in layout))
        pixels = numbered(*grid.prod(1).tolist())
        num_microbatch = draw.randint(2, 4)
        parts = split_model_inputs(
            {"input_ids": ids, "image_grid_thw": grid, "pixel_values": pixels}, num_microbatch, CONFIG
        )
        numbers = iter(range(len(grid)))
        owned = [[next(numbers) for _ in sample] for sample in layout]
        expected = [[*chain(*(owned[row] for row in rows))] for rows in torch.arange(4).tensor_split(num_microbatch)]
        found = [part or [] for part in items_in(parts, "pixel_values")]
        assert [sorted(set(part)) for part in found] == expected
        assert [*chain(*found)] == pixels[:, 0].tolist()


class TestEntriesPerItem:
    def test_images_of_equally_many_tokens_need_no_sizes(self) -> None:
        kwargs = {"input_ids": text([IMAGE] * 8, [WORD], [IMAGE] * 4), "pixel_values": numbered(1, 1, 1)}
        assert items_in(split_model_inputs(kwargs, 3, CONFIG), "pixel_values") == [[0, 1], None, [2]]

    def test_each_run_of_placeholders_is_one_clip(self) -> None:
        ids = text([AUDIO] * 6, [AUDIO, WORD, AUDIO, AUDIO, WORD, AUDIO, AUDIO, AUDIO], [WORD], [WORD])
        kwargs = {
            "input_ids": ids,
            "input_features": numbered(1, 1, 1, 1),
            "feature_attention_mask": numbered(1, 1, 1, 1),
        }
        parts = split_model_inputs(kwargs, 2, CONFIG)
        assert items_in(parts, "input_features") == [[0, 1, 2, 3], None]
        parts = split_model_inputs(kwargs, 4, CONFIG)
        assert items_in(parts, "input_features") == [[0], [1, 2, 3], None, None]
        assert items_in(parts, "feature_attention_mask") == [[0], [1, 2, 3], None, None]

    def test_sizes_determine_the_images_if_placeholder_runs_are_broken_by_rows(self) -> None:
        row = [IMAGE, IMAGE, WORD]
        kwargs = {
            "input_ids": text(row * 2, row * 4 + row, [WORD]),
            "pixel_values": numbered(1, 1, 1),
            "image_sizes": torch.tensor([[28, 28], [56, 28], [14, 28]]),
        }
        assert items_in(split_model_inputs(kwargs, 3, CONFIG), "pixel_values") == [[0], [1, 2], None]

    def test_a_single_image_goes_to_the_sample_with_placeholders(self) -> None:
        kwargs = {"input_ids": text([WORD], [WORD], [IMAGE] * 3), "pixel_values": numbered(1)}
        assert items_in(split_model_inputs(kwargs, 3, CONFIG), "pixel_values") == [None, None, [0]]

    def test_a_single_image_without_placeholders_is_replicated(self) -> None:
        kwargs = {"input_ids": text([WORD], [WORD]), "pixel_values": numbered(1)}
        assert items_in(split_model_inputs(kwargs, 2, CONFIG), "pixel_values") == [[0], [0]]

    def test_images_padded_per_sample_are_split_by_rows(self) -> None:
        images = torch.arange(3)[:, None, None, None, None].expand(3, 2, 3, 4, 4)
        kwargs = {
            "input_ids": text([IMAGE, WORD, IMAGE], [WORD], [IMAGE]),
            "pixel_values": images,
            "pixel_attention_mask": images[:, :, 0],
        }
        parts = split_model_inputs(kwargs, 3, CONFIG)
        assert [part["pixel_values"].unique().tolist() for part in parts] == [[0], [1], [2]]
        assert [part["pixel_attention_mask"].unique().tolist() for part in parts] == [[0], [1], [2]]

    def test_tiles_with_a_size_table_are_split_by_items(self) -> None:
        tiles = torch.arange(3)[:, None, None, None, None].expand(3, 2, 3, 4, 4)
        kwargs = {
            "input_ids": text([IMAGE, WORD, IMAGE], [WORD], [IMAGE]),
            "pixel_values": tiles,
            "image_sizes": torch.full((3, 2), 50),
        }
        parts = split_model_inputs(kwargs, 3, CONFIG)
        assert [part["pixel_values"].unique().tolist() if "pixel_values" in part else None for part in parts] == [
            [0, 1],
            None,
            [2],
        ]

    def test_an_input_may_give_the_number_of_images_per_sample(self) -> None:
        kwargs = {
            "input_ids": text([IMAGE] * 9, [IMAGE] * 2, [IMAGE] * 3),  # adjacent, of unknown sizes
            "pixel_values": numbered(1, 1, 1, 1, 1),
            "batch_num_images": torch.tensor([3, 1, 1]),
        }
        parts = split_model_inputs(kwargs, 2, CONFIG)
        assert items_in(parts, "pixel_values") == [[0, 1, 2, 3], [4]]
        assert [part["batch_num_images"].tolist() for part in parts] == [[3, 1], [1]]

    @pytest.mark.parametrize("as_list", [True, False])
    def test_local_crops_go_with_their_image(self, as_list: bool) -> None:
        counts = [0, 2, 0]
        kwargs = {
            "input_ids": text([IMAGE] * 2, [WORD], [IMAGE] * 4, [IMAGE] * 2),
            "pixel_values": numbered(1, 1, 1),
            "pixel_values_local": numbered(*counts),
            "num_local_patches": counts if as_list else torch.tensor(counts),
        }
        parts = split_model_inputs(kwargs, 4, CONFIG)
        assert items_in(parts, "pixel_values") == [[0], None, [1], [2]]
        assert items_in(parts, "pixel_values_local") == [None, None, [1, 1], None]
        assert [list(part.get("num_local_patches", "-")) for part in parts] == [[0], ["-"], [2], [0]]

    def test_labels_per_image_go_with_the_images(self) -> None:
        kwargs = {
            "input_ids": text([IMAGE, WORD, IMAGE], [WORD], [IMAGE], [WORD]),
            "pixel_values": numbered(1, 1, 1),
            "labels": torch.arange(3),
        }
        parts = split_model_inputs(kwargs, 2, CONFIG)
        assert [part["labels"].tolist() for part in parts] == [[0, 1], [2]]

    def test_empty_image_inputs_are_omitted(self) -> None:
        kwargs = {"input_ids": text([WORD], [WORD]), "pixel_values": torch.zeros(0, 3, 4, 4)}
        assert [part.keys() for part in split_model_inputs(kwargs, 2, CONFIG)] == [{"input_ids"}] * 2


class TestWherePlaceholdersAreFound:
    ids = text([WORD], [IMAGE, WORD, IMAGE], [IMAGE])
    expected = (None, [0, 1], [2])

    def test_a_sub_config_may_have_the_token_id(self) -> None:
        config = SimpleNamespace(id2label={}, image_token_id=None, vision_config=SimpleNamespace(image_token_id=IMAGE))
        parts = split_model_inputs({"input_ids": self.ids, "pixel_values": numbered(1, 1, 1)}, 3, config)
        assert tuple(items_in(parts, "pixel_values")) == self.expected

    def test_token_types_determine_placeholders_of_embedded_inputs(self) -> None:
        kwargs = {
            "inputs_embeds": torch.zeros(3, 3, 4),
            "mm_token_type_ids": (self.ids == IMAGE).long(),
            "pixel_values": numbered(1, 1, 1),
        }
        assert tuple(items_in(split_model_inputs(kwargs, 3, None), "pixel_values")) == self.expected

    def test_token_types_determine_placeholders_if_two_kinds_share_a_token(self) -> None:
        kwargs = {
            "input_ids": self.ids,
            "mm_token_type_ids": (self.ids == IMAGE) * 2,
            "pixel_values_videos": numbered(1, 1, 1),
        }
        assert tuple(items_in(split_model_inputs(kwargs, 3, CONFIG), "pixel_values_videos")) == self.expected


class TestCodebooks:
    def test_a_sample_keeps_the_rows_of_all_its_codebooks(self) -> None:
        config = SimpleNamespace(decoder=SimpleNamespace(num_codebooks=4))
        kwargs = {"input_ids": torch.zeros(3, 5), "decoder_input_ids": torch.arange(12)[:, None]}
        parts = split_model_inputs(kwargs, 2, config)
        assert items_in(parts, "decoder_input_ids") == [list(range(8)), list(range(8, 12))]

    def test_the_mask_determines_the_batch_size_if_tokens_have_codebooks(self) -> None:
        kwargs = {"input_ids": torch.arange(12)[:, None], "attention_mask": torch.ones(3, 1)}
        parts = split_model_inputs(kwargs, 3, SimpleNamespace(num_codebooks=4))
        assert items_in(parts, "input_ids") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]

    def test_labels_are_split_by_the_channels_of_the_decoder(self) -> None:
        config = SimpleNamespace(decoder_config=SimpleNamespace(num_channels=3))
        parts = split_model_inputs({"input_ids": torch.zeros(2, 5), "labels": numbered(3, 3)}, 2, config)
        assert items_in(parts, "labels") == [[0, 0, 0], [1, 1, 1]]


IDS = text([IMAGE] * 3, [IMAGE] * 5, [WORD])

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown_input": ({"extra": torch.zeros(5, 2)}, "extra of shape (5, 2) beside a batch of 3"),
    "not_even": (
        {"pixel_values": torch.zeros(4, 3, 8, 8)},
        "pixel_values of shape (4, 3, 8, 8) beside a batch of 3: image placeholder tokens must say to which sample "
        "each of 4 belongs, but the samples have [3, 5, 0]",
    ),
    "no_placeholders": (
        {"pixel_values_videos": torch.zeros(2, 3)},
        "pixel_values_videos of shape (2, 3) beside a batch of 3: video placeholder tokens must say to which sample "
        "each of 2 belongs, but none is in input_ids (going by the config) or mm_token_type_ids",
    ),
    "grid_that_does_not_fit": (
        {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2], [1, 2, 2], [1, 2, 2]])},
        "image_grid_thw of shape (4, 3) beside a batch of 3",
    ),
    "patches_that_do_not_fit": (
        {"image_grid_thw": torch.tensor([[1, 1, 3], [1, 1, 5]]), "pixel_values": torch.zeros(9, 2)},
        "pixel_values of shape (9, 2) beside a batch of 3: it is not known whether it has an entry for each of the "
        "samples or the 2 image(s)",
    ),
    "packed_sequence": ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "cu_seq_lens_q of shape (3,) beside a batch of 3"),
    "tensor_in_a_container": ({"states": (torch.zeros(5, 2),)}, "states[0] of shape (5, 2) beside a batch of 3"),
    "packed_data": ({"states": RoundPipePackedData([1, 2])}, "states with 2 entries beside a batch of 3"),
    "list_of_clips": ({"input_features": [torch.zeros(2)] * 2}, "input_features with 2 entries beside a batch of 3"),
}


@pytest.mark.parametrize(("extra", "said"), REFUSED.values(), ids=REFUSED)
def test_inputs_that_cannot_be_assigned_are_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(SplitError) as caught:
        split_model_inputs({"input_ids": IDS, **extra}, 2, CONFIG)
    assert str(caught.value).startswith(f"cannot split {said}")
    assert str(caught.value).endswith(
        "Say how to split this call with split_input=..., or run it with num_microbatch=1"
    )


def test_an_unclear_batch_size_is_refused() -> None:
    with pytest.raises(
        SplitError, match=r"from left of shape \(4, 2\), right of shape \(5, 2\): their first dimensions"
    ):
        split_model_inputs({"left": torch.zeros(4, 2), "right": torch.zeros(5, 2)}, 2, None)


class TestLabelBesideInputs:
    """The label of a call has one row per sample, like the inputs that the model's split recognizes."""

    def labels(self, kwargs: dict[str, Any], label: Any, num_microbatch: int = 2, **options: Any) -> list[Any]:
        split = split_call(
            (), kwargs, label, num_microbatch=num_microbatch, split_input=ModelInputSplit(CONFIG), **options
        )
        return list(split.labels)

    @pytest.mark.parametrize("num_microbatch", [1, 2, 9])
    def test_other_numbers_of_rows_are_refused_with_both_names(self, num_microbatch: int) -> None:
        for kwargs in ({"input_ids": IDS}, {"points": torch.zeros(3, 4)}):
            (name,) = kwargs
            with pytest.raises(
                SplitError, match=rf"kwargs\['{name}'\] of shape .* has 3 .*, label of shape \(4,\) has 4"
            ):
                self.labels(kwargs, torch.zeros(4), num_microbatch)

    def test_a_label_with_a_row_per_sample_follows_the_samples_not_the_items(self) -> None:
        images = {"image_grid_thw": torch.tensor([[1, 1, 3], [1, 1, 5]]), "pixel_values": torch.zeros(8, 2)}
        first, second = self.labels({"input_ids": IDS, **images}, torch.arange(3))
        assert (first.tolist(), second.tolist()) == ([0, 1], [2])

    def test_a_label_with_one_row_goes_to_every_microbatch(self) -> None:
        label = torch.zeros(1, 5)
        assert all(piece is label for piece in self.labels({"input_ids": IDS}, label, 3))
        assert len(self.labels({"input_ids": IDS}, label, 3)) == 3

    def test_a_replicated_label_may_have_any_number_of_rows(self) -> None:
        table = torch.zeros(50, 2)
        assert all(piece is table for piece in self.labels({"input_ids": IDS}, table, split_label=Replicate))

    def test_one_microbatch_takes_any_label_if_the_batch_size_is_unclear(self) -> None:
        label = torch.zeros(9)
        assert self.labels({"left": torch.zeros(4, 2), "right": torch.zeros(5, 2)}, label, 1)[0].shape == (9,)
