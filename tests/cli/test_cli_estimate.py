"""`roundpipe estimate`: models by name, folder and file; text, JSON, exit codes and mistakes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from helpers_packed import packed_places
from helpers_quantised import quantised_copy
from helpers_tiny_hf import save_tiny_model, tiny_model
from roundpipe.__main__ import main
from roundpipe.cli.estimate import _EXAMPLE, load_on_paper
from roundpipe.estimate import meter
from roundpipe.estimate.figures import SHAPES
from roundpipe.split import head_loss

BILLIONS = {
    "qwen3-0.6b": 0.60, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.09, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55, "mistral-7b": 7.25, "mistral-nemo-12b": 12.25, "mistral-small-24b": 23.57,
    "gemma-3-1b": 1.00, "gemma-3-4b": 4.30, "gemma-3-12b": 12.19, "gemma-3-27b": 27.43, "gpt-oss-20b": 20.91,
}  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["estimate", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, _ = answer(capsys, *words, "--json")
    content: dict[str, Any] = json.loads(out)
    assert code == (0 if content["fits"] else 1)
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_layers=3).config.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_has_the_number_of_parameters_of_its_model(name: str) -> None:
    paper = load_on_paper(name, torch.bfloat16, None)
    count = sum(param.numel() for param in paper.model.parameters())
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    assert all(param.is_meta for param in paper.model.parameters())


def test_a_model_of_94_layers_on_eight_gaming_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--devices", "8x24GB", "--lora", "16")
    found = as_json(capsys, "qwen3-235b-a22b", *machine, "--ram", "1000")
    assert found["fits"]
    assert found["parameters"] > 235e9
    assert found["host_bytes"]["weights"] == pytest.approx(2 * found["parameters"], rel=1e-3)
    assert sum(found["device_bytes"].values()) <= found["device_reserved_bytes"] <= found["device_limit_bytes"] < 24e9
    assert found["plan"]["bwd_plan"][0][1] == 96
    assert found["seconds"]["step"] >= max(found["seconds"]["compute"], found["seconds"]["link"])
    assert not as_json(capsys, "qwen3-235b-a22b", *machine, "--ram", "256")["fits"]


@pytest.mark.parametrize(("form", "bits"), [("nf4", 4.25), ("int8", 8.125)])
def test_frozen_weights_are_packed(form: str, bits: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Linear weights and experts; embedding, head, norms and adapters stay at 16 bits."""
    work = ("gpt-oss-20b", "--devices", "1x24GB", "--ram", "64", "--batch", "2", "--seq-len", "128", "--lora", "8")
    plain, packed = as_json(capsys, *work), as_json(capsys, *work, "--frozen-weights", form)
    assert packed["parameters"] == plain["parameters"]
    assert packed["trained"] == plain["trained"]
    linear_bytes = 2 * (plain["parameters"] - plain["trained"] - 2 * 201088 * 2880)
    saved = plain["host_bytes"]["weights"] - packed["host_bytes"]["weights"]
    assert saved == pytest.approx(linear_bytes * (1 - bits / 16), rel=0.005)  # the rest are biases, norms and routers
    assert packed["seconds"]["link"] < 0.7 * plain["seconds"]["link"]
    code, _, error = answer(capsys, "qwen3-0.6b", "--devices", "1x24GB", "--frozen-weights", form)
    assert code == 2
    assert "add --lora R" in error


def test_folder_and_file_give_the_same_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--devices", "1x24GB", "--ram", "8", "--batch", "4", "--seq-len", "32", "--stale", "--microbatches", "9")
    of_folder = as_json(capsys, str(folder), *options)
    of_file = as_json(capsys, str(folder / "config.json"), *options)
    assert of_folder | {"model": ""} == of_file | {"model": ""}
    assert of_folder["microbatches"] == 4  # no more than sequences
    assert of_folder["work"] == {"batch": 4, "seq_len": 32, "exact": False, "optimizer": "Adam"}


def test_the_text_has_every_part_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "qwen3-0.6b", "--devices", "2xRTX3090", "--ram", "16", "--seq-len", "32")
    assert code == 0
    for part in (
        "28 blocks",
        "exact steps",
        "2 x 25.8 GB",
        "optimizer state (Adam)",
        "plans may use",
        "stages",
        "bound by",
    ):
        assert part in out
    verdict, left = out.splitlines()[-2:]
    assert re.fullmatch(r"fits: the plan reserves [\d.]+ of the 23\.2 GB that plans may use on a device,", verdict)
    assert re.fullmatch(r"[\d.]+ GB of host memory are left", left)
    code, out, _ = answer(capsys, "qwen3-8b", "--devices", "1x24GB", "--ram", "64")
    assert code == 1
    (needed,) = re.findall(r"needed in all +([\d.]+) GB", out)
    assert f"DOES NOT FIT into host memory: {float(needed) - 64 * 1.073741824:.1f} GB are missing. Use --lora R" in out
    code, out, _ = answer(capsys, "qwen3-8b", "--devices", "1x2GB", "--ram", "640")
    assert code == 1
    assert "DOES NOT FIT into device memory: with one layer per stage the plan reserves" in out
    assert "more microbatches" not in out  # every sequence is one


@pytest.mark.parametrize(
    ("option", "name", "num_states"),
    [("adam", "Adam", 2), ("lion", "Lion", 1), ("sgd-momentum", "SGD with momentum", 1), ("sgd", "SGD", 0)],
)
def test_the_state_is_that_of_the_optimizer(
    option: str, name: str, num_states: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("qwen3-0.6b", "--devices", "1x24GB", "--ram", "64", "--seq-len", "32", "--optimizer", option)
    found = as_json(capsys, *words)
    assert found["host_bytes"].get(f"optimizer state ({name})", 0) == 4 * num_states * found["trained"]
    assert [row for row in found["host_bytes"] if row.startswith("optimizer state")] == (
        [f"optimizer state ({name})"] if num_states else []
    )


@pytest.mark.parametrize(("moments", "num_bytes"), [("bfloat16", 2), ("8bit", 1 + 4 / 256)])
def test_moments_and_masters_in_low_bits_take_less(
    moments: str, num_bytes: float, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("qwen3-0.6b", "--devices", "1x24GB", "--ram", "64", "--seq-len", "32", "--moments", moments)
    found = as_json(capsys, *words, "--master-bits", "24")
    assert found["host_bytes"]["master weights"] == found["trained"]
    # Norms have fewer than 4,096 elements.
    assert found["host_bytes"][f"optimizer state (Adam, {moments})"] == pytest.approx(
        2 * num_bytes * found["trained"], rel=2e-3
    )
    code, _, err = answer(capsys, *words, "--optimizer", "sgd")
    assert code == 2
    assert f"--moments {moments} is for adam and lion" in err


def test_masters_of_24_bits_need_weights_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen3-0.6b", "--devices", "1x24GB", "--ram", "64", "--master-bits", "24", "--dtype", "float32")
    code, _, err = answer(capsys, *words)
    assert code == 2
    assert "--master-bits 24 needs --dtype bfloat16, got float32" in err


def test_a_refusal_names_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen3-8b", "--devices", "1x24GB", "--ram", "80GB", "--seq-len", "32", "--optimizer")
    assert "the optimizer's state is that of Lion" in as_json(capsys, *words, "lion")["refusal"]
    assert as_json(capsys, *words, "sgd")["refusal"] is None


def test_the_example_of_the_help_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, *shlex.split(_EXAMPLE)[2:])
    assert code == 0
    assert "8.19 billion parameters, 8.19 billion trained" in out


def test_small_numbers_are_readable(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, str(folder), "--devices", "1x24GB", "--ram", "8", "--batch", "1", "--seq-len", "32")
    assert re.search(r"3 blocks, 0\.\d+ million parameters, 0\.\d+ million trained", out)
    assert "1 sequence of 32 tokens, exact steps, 1 microbatch (chosen)" in out
    assert "1 stage: 0 forward" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing-here", "--devices", "1x24GB"), "no such shape; the shapes are: qwen3-0.6b"),
        (("qwen3-8b", "--devices", "1x24TB"), "--devices 1x24TB: unknown"),
        (("gpt2", "--devices", "1x24GB"), "A name on the hub has its owner before a slash"),
        (("./no/such/folder", "--devices", "1x24GB"), "there is no folder or file ./no/such/folder"),
    ],
)
def test_mistakes_are_explained(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        ("--batch", "0"),
        ("--ram", "-3"),
        ("--ram", "9" * 400),
        ("--lora", "x"),
        ("--lora", "8", "--full"),
        ("--seq-len", "9" * 5000),
        ("--microbatches", "10001"),
        ("--devices", "99999999x24GB"),
        ("--devices", "\u00b2x24GB"),
        ("--devices", f"1x{'9' * 400}GB"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(capsys, "qwen3-8b", *(() if words[0] == "--devices" else ("--devices", "1x24GB")), *words)
    assert code == 2
    assert words[0] in err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("128", 128 << 30), ("128GiB", 128 << 30), ("128GB", 128 * 10**9), ("1.5 tib", 3 << 39), ("2TB", 2 * 10**12)],
)
def test_host_memory_has_a_unit_or_is_in_gib_as_it_is_sold(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, num_bytes: int
) -> None:
    found = as_json(capsys, str(folder), "--devices", "1x24GB", "--ram", text, "--batch", "1", "--seq-len", "8")
    assert found["machine"]["ram_bytes"] == num_bytes


def test_sequences_beyond_the_positions_of_the_model_are_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("qwen3-0.6b", "--devices", "1x24GB", "--ram", "64", "--batch", "1", "--seq-len")
    assert as_json(capsys, *options, "40960")["remarks"] == []
    remark = "--seq-len 40961 is longer than the 40960 positions of the model"
    assert as_json(capsys, *options, "40961")["remarks"] == [remark]
    assert remark in answer(capsys, *options, "40961")[1]


def test_a_million_tokens_are_metered_without_running_every_chunk_of_the_head(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    real = head_loss._run_chunk
    monkeypatch.setattr(head_loss, "_run_chunk", lambda *args: (runs.append(1), real(*args)))
    found = as_json(capsys, "qwen3-0.6b", "--devices", "1x24GB", "--ram", "64", "--batch", "1", "--seq-len", "1000000")
    assert found["seconds"]["compute"] > 100
    assert len(runs) < 20  # of 2,375 chunks


def test_a_model_without_sdpa_is_estimated_with_eager_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps the scores of all pairs of tokens."""
    from transformers import GptOssConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 500}
    GptOssConfig(**sizes).save_pretrained(tmp_path)
    found = as_json(capsys, str(tmp_path), "--devices", "1x24GB", "--ram", "64", "--batch", "1", "--seq-len", "2048")
    assert "eager attention" in found["remarks"][0]
    scores_of_a_block = 4 * 2048**2 * 2
    assert found["device_bytes"]["activations and loss"] > 2 * scores_of_a_block


def test_a_model_that_sees_images_is_estimated_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory of all its parameters counts. Its blocks are those of its text."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    images = CLIPVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    text = tiny_model("llama", num_layers=3).config
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=images, text_config=text))
    model.config.save_pretrained(tmp_path)
    options = (str(tmp_path), "--devices", "1x24GB", "--ram", "64", "--batch", "2", "--seq-len", "32")
    found = as_json(capsys, *options)
    assert found["parameters"] == sum(param.numel() for param in model.parameters())
    assert found["plan"]["bwd_plan"][0][1] == 5
    assert "without images: of the" in found["remarks"][0]
    adapted = as_json(capsys, *options, "--lora", "2")
    of_text = [m for m in model.model.language_model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert adapted["trained"] == sum(2 * (linear.in_features + linear.out_features) for linear in of_text)


def test_a_loop_over_tokens_ends_the_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MambaConfig

    monkeypatch.setattr(meter, "_MOST_OPERATIONS", 3000)
    MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=100).save_pretrained(tmp_path)
    code, _, err = answer(capsys, str(tmp_path), "--devices", "1x24GB", "--batch", "1", "--seq-len", "1000")
    assert code == 2
    assert "MambaForCausalLM with 1000 tokens cannot be estimated: a pass takes more than 3,000 operations" in err


def test_without_a_gpu_the_devices_must_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundpipe.cli.estimate.device_count", lambda: 0)
    code, _, err = answer(capsys, "qwen3-8b")
    assert code == 2
    assert "--devices 1x24GB" in err


def test_a_config_that_is_no_causal_language_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    code, _, err = answer(capsys, str(tmp_path), "--devices", "1x24GB")
    assert code == 2
    assert "cannot make a model of" in err
    (tmp_path / "config.json").write_text("{")
    assert answer(capsys, str(tmp_path), "--devices", "1x24GB")[0] == 2


def test_a_name_that_is_no_folder_and_not_on_the_hub_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str) -> None:
        raise OSError(f"cannot reach the hub for {name}\nmore")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    code, _, err = answer(capsys, "runs/nothing", "--devices", "1x24GB")
    assert code == 2
    assert (
        "runs/nothing: there is no such folder or file, and from the hub: cannot reach the hub for runs/nothing\n"
        in err
    )


def test_weights_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    work = (
        "qwen3-0.6b",
        "--devices",
        "1x24GB",
        "--batch",
        "2",
        "--seq-len",
        "64",
        "--microbatches",
        "2",
        "--lora",
        "8",
    )
    packed = ("--frozen-weights", "nf4", "--ram")
    memory = as_json(capsys, *work, *packed, "4")
    mapped = as_json(capsys, *work, *packed, "4", "--weights-on-disk")
    assert memory["host_bytes"] == {**mapped["host_bytes"], "weights": memory["host_bytes"]["weights"]}
    frozen = memory["host_bytes"]["weights"] - mapped["host_bytes"]["weights"]
    assert 0 <= mapped["host_bytes"]["weights"] - 2 * mapped["trained"] < 1000  # buffers
    assert (mapped["disk_bytes"], mapped["disk_read_bytes"], mapped["seconds"]["disk"]) == (frozen, 0, 0)
    assert mapped["seconds"]["link"] > memory["seconds"]["link"]  # from memory that is not pinned
    needed = sum(mapped["host_bytes"].values())
    small = as_json(capsys, *work, *packed, f"{needed * 1.2 / 1e9:.3f}GB", "--weights-on-disk", "0.25")
    assert small["fits"]
    # One stage has all layers. The first and the last one share the embedding.
    assert small["disk_read_bytes"] == frozen + 2 * 151936 * 1024
    assert small["seconds"]["disk"] == pytest.approx(small["disk_read_bytes"] / 0.25e9)
    assert small["seconds"]["step"] >= small["seconds"]["disk"]
    assert small["bound"] == "disk"
    _, out, _ = answer(capsys, *work, *packed, "0.3", "--weights-on-disk", "--state-on-disk")
    assert re.search(
        r"disk +[\d.]+ GB of optimizer state, .*\n +[\d.]+ GB of frozen weights, more than memory has", out
    )
    _, _, error = answer(capsys, *work, "--weights-on-disk")
    assert error.endswith("add --lora R and --frozen-weights nf4.\n")


def test_a_folder_that_comes_quantised_is_counted_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "plain", "llama", hidden_size=64)
    quantised_copy(tmp_path / "plain", tmp_path / "quantised", tmp_path / "rounded", "int8")
    options = ("--devices", "1x24GB", "--ram", "8", "--seq-len", "32", "--lora", "2", "--dtype", "float32")
    plain, quantised = (as_json(capsys, str(tmp_path / name), *options) for name in ("plain", "quantised"))
    assert quantised["parameters"] == plain["parameters"]
    taken = packed_places(roundpipe.load(tmp_path / "quantised"))
    saved = sum(4 * described.num_elements - described.num_bytes for described in taken.values())
    assert plain["host_bytes"]["weights"] - quantised["host_bytes"]["weights"] == saved > 0
    _, out, _ = answer(capsys, str(tmp_path / "quantised" / "config.json"), *options)
    assert "its weights come quantised, but are counted in float32: give their folder, and --lora R" in out


def test_state_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("qwen3-0.6b", "--devices", "1x24GB", "--batch", "2", "--seq-len", "64", "--microbatches", "2", "--ram")
    code, out, _ = answer(capsys, *machine, "6")
    assert code == 1
    assert "--state-on-disk" in out
    found = as_json(capsys, *machine, "6", "--state-on-disk", "0.5")
    assert found["fits"]
    assert found["disk_bytes"] == pytest.approx(8 * found["trained"], rel=0.01)
    assert found["seconds"]["disk"] == pytest.approx(2 * found["disk_bytes"] / 0.5e9)
    assert found["bound"] == "disk"
    _, out, _ = answer(capsys, *machine, "1", "--state-on-disk")
    assert "disk       4.77 GB of optimizer state, read and written in each step: 4.77 s at 2 GB/s" in out
    assert "--state-on-disk" not in out
    assert answer(capsys, *machine, "6", "--state-on-disk", "-1")[0] == 2
