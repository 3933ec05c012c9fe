"""Microbatches of Hugging Face models give the logits of the whole batch, whichever samples the images belong to.

Compares with the plain model on the whole batch; nothing of RoundPipe but `split_model_inputs` runs. What is computed
at padding may differ (a text-only microbatch of Qwen counts positions otherwise there), so it is not compared.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_cases import Batch, Case, case_named, decode_batch, load_cases
from torch import Tensor, nn

from roundpipe.microbatch.hf_inputs import split_model_inputs

pytest.importorskip("transformers")

SEQUENCES = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
TOKEN_NAMES = [f"{kind}_token_{ending}" for kind in ("image", "video", "audio") for ending in ("id", "index")]
PLAIN_TOKEN = 33  # no placeholder in any of the cases
LABELS = ("labels", "text_labels", "start_positions", "end_positions")

# One image, clip or video per row in the case; here a sample takes several rows, or one without its item.
ITEM_CASES = {
    "llava:LlavaForConditionalGeneration": "pixel_values [images, 3, height, width]",
    "mistral3:Mistral3ForConditionalGeneration": "image_sizes beside it",
    "granite4_vision:Granite4VisionForConditionalGeneration": "pixel_values [images, tiles, 3, height, width]",
    "minicpmv4_6:MiniCPMV4_6ForConditionalGeneration": "all images side by side in pixel_values [1, 3, height, width]",
    "qwen2_vl:Qwen2VLForConditionalGeneration": "image_grid_thw, a patch per image",
    "cosmos3_edge:Cosmos3EdgeForConditionalGeneration": "image_grid_thw, four patches to a token",
    "glm46v:Glm46VForConditionalGeneration": "image_grid_thw, many tokens per image",
    "paddleocr_vl:PaddleOCRVLForConditionalGeneration": "patches [patches, 3, height, width]",
    "video_llama_3:VideoLlama3ForConditionalGeneration": "image_merge_sizes",
    "qwen2_audio:Qwen2AudioForConditionalGeneration": "clips of different length, feature_attention_mask",
    "gemma4:Gemma4ForConditionalGeneration": "clips of equal length, input_features_mask",
    "llava_next_video:LlavaNextVideoForConditionalGeneration": "images and videos",
}
LAYOUTS = {
    "two_and_one": [[0, 1], [2]],
    "two_none_one": [[0, 1], [], [2]],
    "none_one_two": [[], [0], [1, 2]],
}

# The batch as it is in the case.
ROW_CASES = (
    "llama:LlamaForCausalLM",
    "idefics2:Idefics2ForConditionalGeneration",
    "mllama:MllamaForConditionalGeneration",
    "phi4_multimodal:Phi4MultimodalForCausalLM",
    "qwen2_5_omni:Qwen2_5OmniThinkerForConditionalGeneration",
    "siglip2:Siglip2ForImageClassification",
    "hubert:HubertForSequenceClassification",
    "gpt2:GPT2DoubleHeadsModel",
    "musicgen_melody:MusicgenMelodyForConditionalGeneration",
    "dia:DiaForConditionalGeneration",
)


def without_labels(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in LABELS}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits


def attended(logits: Tensor, batch: Batch) -> Tensor:
    """Return the logits without those at padding, if they are [samples, tokens, ...]."""
    mask = batch.get("attention_mask")
    return logits if mask is None or mask.shape != logits.shape[:2] else logits[mask.bool()]


def assert_same_logits(model: nn.Module, batch: Batch, num_microbatch: int) -> list[Batch]:
    microbatches = split_model_inputs(batch, num_microbatch, model.config)
    assert len(microbatches) == num_microbatch
    found = torch.cat([logits_of(model, microbatch) for microbatch in microbatches])
    expected = logits_of(model, batch)
    torch.testing.assert_close(attended(found, batch), attended(expected, batch), atol=1e-4, rtol=1e-4)
    return microbatches


def assert_items_matter(model: nn.Module, batch: Batch) -> None:
    """Assert that other items in the same places change the logits, so that a wrong item would be noticed."""
    names = [
        name for name in batch if name.startswith(("pixel_values", "input_features")) and not name.endswith("mask")
    ]
    expected = attended(logits_of(model, batch), batch)
    for name in names:
        dim = 0 if len(batch[name]) > 1 else -1
        changed = attended(logits_of(model, batch | {name: batch[name].flip(dim)}), batch)
        assert (changed - expected).abs().max() > 1e-2, name


def item_batch(case: Case, model: nn.Module, layout: list[list[int]]) -> Batch:
    """The rows and items of a case in other samples: `[[0, 1], []]` is a sample of two rows and one without item."""
    batches = [without_labels(decode_batch(inputs)) for inputs in (case.inputs, case.inputs_other_shape)]
    batch = max(batches, key=lambda batch: len(batch["input_ids"]))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    num_rows, num_items = len(batch["input_ids"]), sum(map(len, layout))
    arranged: Batch = {}
    for name, value in batch.items():
        if name in SEQUENCES:
            rows = [torch.cat([value[row] for row in rows] or [text_only(name, batch, model)]) for rows in layout]
            arranged[name] = nn.utils.rnn.pad_sequence(rows, True, PLAIN_TOKEN if name == "input_ids" else 0)
        elif not isinstance(value, Tensor):
            arranged[name] = value
        else:
            dim = value.dim() - 1 if len(value) == 1 else 0
            arranged[name] = value.narrow(dim, 0, value.shape[dim] // num_rows * num_items)
    return arranged


def text_only(name: str, batch: Batch, model: nn.Module) -> Tensor:
    tokens = {token for key in TOKEN_NAMES if (token := getattr(model.config, key, None)) is not None}
    is_item = torch.isin(batch["input_ids"][0], torch.tensor(sorted(tokens)))
    row: Tensor = batch[name][0]
    return row.masked_fill(is_item, {"input_ids": PLAIN_TOKEN, "attention_mask": 1}.get(name, 0))


@pytest.mark.parametrize("key", ITEM_CASES, ids=lambda key: key.split(":")[0])
def test_images_clips_and_videos_go_with_their_samples(key: str) -> None:
    case = case_named(key)
    model = case.build_model().eval()
    for layout in LAYOUTS.values():
        batch = item_batch(case, model, layout)
        for num_microbatch in range(2, len(layout) + 1):
            assert_same_logits(model, batch, num_microbatch)
        assert_items_matter(model, batch)


@pytest.mark.parametrize("key", ROW_CASES, ids=lambda key: key.split(":")[0])
def test_a_batch_of_rows_gives_the_logits_of_the_whole(key: str) -> None:
    case = case_named(key)
    model = case.build_model().eval()
    assert_same_logits(model, without_labels(decode_batch(case.inputs)), 2)


def grid_batch(model: nn.Module, kind: str, samples: list[list[tuple[int, int, int]]], merge: int) -> Batch:
    """Samples with items of these grids, each item after a few words, with patches of noise."""
    generator = torch.Generator().manual_seed(1)
    token = model.config.image_token_id
    types = {"image": 1, "video": 2}[kind]
    ids, marks = [], []
    for grids in samples:
        row, mark = torch.randint(20, 60, (5,), generator=generator), torch.zeros(5, dtype=torch.long)
        for time, height, width in grids:
            placeholders = torch.full((time * height * width // merge**2,), token)
            words = torch.randint(20, 60, (3,), generator=generator)
            row = torch.cat([row, placeholders, words])
            mark = torch.cat([mark, torch.full_like(placeholders, types), torch.zeros_like(words)])
        ids.append(row)
        marks.append(mark)
    grid = torch.tensor([item for grids in samples for item in grids])
    pixels = torch.randn(int(grid.prod(1).sum()), numbers_per_patch(model), generator=generator)
    suffix = "_videos" if kind == "video" else ""
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, True, PLAIN_TOKEN),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], True),
        "mm_token_type_ids": nn.utils.rnn.pad_sequence(marks, True),
        f"pixel_values{suffix}": pixels,
        f"{kind}_grid_thw": grid,
    }


def numbers_per_patch(model: nn.Module) -> int:
    vision: Any = model.config.vision_config
    return 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2


GRID_SAMPLES = {
    "sizes_differ": [[(1, 2, 4)], [(1, 4, 4), (1, 2, 2)], [(1, 6, 2)]],
    "first_and_last_without": [[], [(1, 4, 2), (1, 2, 2), (1, 2, 6)], [(1, 2, 2)], []],
    "as_many_items_as_samples": [[(1, 2, 2), (1, 2, 6)], [], [(1, 4, 4)]],
}


@pytest.mark.parametrize("samples", GRID_SAMPLES.values(), ids=GRID_SAMPLES)
@pytest.mark.parametrize(
    ("key", "merge"),
    [
        ("qwen2_vl:Qwen2VLForConditionalGeneration", 1),
        ("qwen3_vl:Qwen3VLForConditionalGeneration", 1),
        ("cosmos3_edge:Cosmos3EdgeForConditionalGeneration", 2),
    ],
    ids=["qwen2_vl", "qwen3_vl", "cosmos3_edge"],
)
def test_images_of_different_sizes_are_cut_by_their_patches(
    key: str, merge: int, samples: list[list[tuple[int, int, int]]]
) -> None:
    model = case_named(key).build_model().eval()
    batch = grid_batch(model, "image", samples, merge)
    for num_microbatch in range(2, len(samples) + 1):
        for microbatch, rows in zip(
            assert_same_logits(model, batch, num_microbatch),
            torch.arange(len(samples)).tensor_split(num_microbatch),
            strict=True,
        ):
            has_images = any(samples[row] for row in rows)
            assert ("pixel_values" in microbatch, "image_grid_thw" in microbatch) == (has_images, has_images)
    assert_items_matter(model, batch)


def test_videos_whose_placeholders_are_those_of_images_are_found_by_token_type() -> None:
    model = case_named("glm46v:Glm46VForConditionalGeneration").build_model().eval()
    batch = grid_batch(model, "video", [[(1, 2, 2)], [(1, 4, 4), (1, 2, 4)], []], merge=1)
    assert_same_logits(model, batch, 2)
    assert_same_logits(model, batch, 3)
    assert_items_matter(model, batch)


def test_positions_with_axes_in_front_are_cut_along_their_second_dimension() -> None:
    model = case_named("qwen2_vl:Qwen2VLForConditionalGeneration").build_model().eval()
    batch = grid_batch(model, "image", [[(1, 2, 2)], [(1, 2, 4)], [(1, 4, 4)]], merge=1)
    positions, _ = model.model.get_rope_index(
        batch["input_ids"], batch["mm_token_type_ids"], batch["image_grid_thw"], attention_mask=batch["attention_mask"]
    )
    assert positions.shape[:2] == (3, 3)
    microbatches = assert_same_logits(model, batch | {"position_ids": positions}, 2)
    assert [microbatch["position_ids"].shape[1] for microbatch in microbatches] == [2, 1]


@pytest.mark.parametrize("key", ["dia:DiaForConditionalGeneration", "musicgen_melody:MusicgenMelodyForCausalLM"])
def test_labels_of_codebooks_stay_with_their_samples(key: str) -> None:
    case = case_named(key)
    model, batch = case.build_model().eval(), decode_batch(case.inputs)
    num_samples = len(batch["attention_mask"])
    with torch.no_grad():
        losses = [
            model(**microbatch).loss * len(microbatch["attention_mask"]) / num_samples
            for microbatch in split_model_inputs(batch, num_samples, model.config)
        ]
        torch.testing.assert_close(sum(losses), model(**batch).loss, atol=1e-5, rtol=1e-5)


def test_every_case_can_be_cut_but_those_of_one_sample() -> None:
    """With the config as the case has it; no model is built."""
    import transformers

    for case in load_cases():
        config = getattr(transformers, case.config_class).from_dict(copy.deepcopy(case.config))
        for batch in (decode_batch(case.inputs), decode_batch(case.inputs_other_shape)):
            microbatches = split_model_inputs(batch, 2, config)
            assert len(microbatches) == 2 or len(batch["input_ids"]) == 1, case
            assert all(microbatch.keys() == batch.keys() for microbatch in microbatches), case
