"""Images beside text: `roundpipe train` with a vision-language model trains as plain SFTTrainer on the same rows."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pixels
from tiny_models import BEGIN, END, new_tokenizer, save_model
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    set_seed,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.cli.rows import read_rows
from roundpipe.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
NUM_ROWS = 9
SIZE = 8  # pixels of an image, as the model sees it
SIZES: dict[str, int] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny LLaVA and images."""
    folder = tmp_path_factory.mktemp("images")
    tokenizer = new_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, END, "<image>"]})
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token="<image>",
    ).save_pretrained(folder / "model")
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=SIZE, patch_size=4, **SIZES),
        text_config=LlamaConfig(vocab_size=272, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, **SIZES),
        image_token_index=image_token,
        vision_feature_layer=-1,
    )
    set_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder / "model")
    draw(folder)
    return folder


def draw(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(NUM_ROWS):
        Pixels.fromarray(rng.integers(0, 255, (10, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Gemma 3 and images."""
    folder = tmp_path_factory.mktemp("gemma")
    plain = new_tokenizer(TEMPLATE)
    plain.add_special_tokens({"additional_special_tokens": [BEGIN, END, "<image>", "<eoi>", "<soft>"]})
    plain.save_pretrained(folder / "tokenizer")
    names = {"image_token": "<soft>", "boi_token": "<image>", "eoi_token": "<eoi>"}
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", extra_special_tokens=names)
    pixels = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    processor = Gemma3Processor(pixels, tokenizer, chat_template=TEMPLATE, image_seq_length=4)
    processor.save_pretrained(folder / "model")
    text = Gemma3TextConfig(
        vocab_size=280, max_position_embeddings=256, num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=1,
        **SIZES,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(image_size=SIZE, patch_size=4, **SIZES),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    set_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder / "model")
    draw(folder)
    return folder


def shows(n: int) -> bool:
    """Whether a row has an image. Batches have some, and one has none."""
    return n % 2 == 0 and n < 6


def answer(n: int) -> str:
    return f"it is {n}" * (n % 2 + 1)


def llava(n: int, folder: Path) -> dict[str, Any]:
    """The keys of LLaVA's data: ShareGPT with the mark of an image."""
    mark = "<image>\n" if shows(n) else ""
    turns = [{"from": "human", "value": f"{mark}what {n}"}, {"from": "gpt", "value": answer(n)}]
    return {"conversations": turns, **({"image": f"{n}.png"} if shows(n) else {})}


def openai(n: int, folder: Path) -> dict[str, Any]:
    """OpenAI's parts, with the image as a data URL."""
    text = base64.b64encode((folder / f"{n}.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
    content = [*([part] if shows(n) else []), {"type": "text", "text": f"what {n}"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer(n)}]}


def table(n: int, folder: Path) -> dict[str, Any]:
    """A table with a column of images."""
    return {
        "images": [{"bytes": (folder / f"{n}.png").read_bytes(), "path": None}] if shows(n) else [],
        "prompt": [{"role": "user", "content": f"what {n}"}],
        "completion": [{"role": "assistant", "content": answer(n)}],
    }


def write(folder: Path, name: str, rows: list[Any]) -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        message = [{"role": Value("string"), "content": Value("string")}]
        features = Features({"images": List(Image()), "prompt": message, "completion": message})
        Dataset.from_list(rows, features=features).to_parquet(path)
    else:
        path.write_text(json.dumps(rows))
    return path


def plain_losses(folder: Path, out: Path) -> list[float]:
    """The losses of TRL's trainer on the rows in its own columns."""
    rows = []
    for n in range(NUM_ROWS):
        pixels = [Pixels.open(io.BytesIO((folder / f"{n}.png").read_bytes()))] if shows(n) else []
        prompt = [{"role": "user", "content": f"what {n}"}]
        rows.append({"images": pixels, "prompt": prompt, "completion": [{"role": "assistant", "content": answer(n)}]})
    config = SFTConfig(
        output_dir=str(out), use_cpu=True, bf16=False, report_to="none", max_steps=4, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=3, logging_steps=1, seed=42,
        max_length=128, save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = AutoProcessor.from_pretrained(folder / "model")
    trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=processor)
    batches = ["pixel_values" in batch for batch in trainer.get_train_dataloader()]
    assert set(batches) == {True, False}  # some batch has no image at all
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def words(folder: Path, data: Path, out: Path, *more: str) -> list[str]:
    needed = ["--model", str(folder / "model"), "--data", str(data), "--out", str(out), "--no-view"]
    return ["train", *needed, "--batch", "3", "--lr", "1e-2", "--seq-len", "128", "--steps", "4", *more]


def losses(out: Path) -> list[float]:
    newest = latest(out)
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize(
    ("name", "given", "devices"),
    [
        ("llava.json", llava, "cpu*3"),
        ("openai.json", openai, "cpu"),
        pytest.param("table.parquet", table, "cpu", marks=pytest.mark.slow),
    ],
)
def test_mixed_batches_with_and_without_images_do_not_hang_and_train_as_in_trl(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, given: Any, devices: str
) -> None:
    """A resumed run goes on exactly."""
    data = write(folder, name, [given(n, folder) for n in range(NUM_ROWS)])
    out = tmp_path / "out"
    assert main(words(folder, data, out, "--devices", devices, "--save-every", "2")) == 0
    assert ", with images\n" in capsys.readouterr().out
    whole = losses(out)
    assert whole == pytest.approx(plain_losses(folder, tmp_path / "plain"), rel=1e-5)
    assert main(["train", "--config", str(out / "train.yaml"), "--resume", str(out / "checkpoint-2")]) == 0
    assert losses(out) == whole
    assert LlavaForConditionalGeneration.from_pretrained(out).config.model_type == "llava"
    assert AutoProcessor.from_pretrained(out).image_token == "<image>"


def test_gemma_3_trains_mixed_batches_as_in_trl(gemma: Path, tmp_path: Path) -> None:
    data = write(gemma, "llava.json", [llava(n, gemma) for n in range(NUM_ROWS)])
    assert main(words(gemma, data, tmp_path / "out", "--devices", "cpu*3")) == 0
    assert losses(tmp_path / "out") == pytest.approx(plain_losses(gemma, tmp_path / "plain"), rel=1e-5)


def test_rows_with_images_are_shown_with_their_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(folder, "show.json", [llava(n, folder) for n in range(2)])
    assert main(["data", str(data), "--model", str(folder / "model"), "--devices", "cpu", "--rows", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    patches = "<image>" * (SIZE // 4) ** 2
    assert f"{BEGIN}user:{patches}what 0{END}{BEGIN}assistant:[[it is 0{END}]]" in lines


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "none.png"}, "there is no image "),
        ({"image": "https://a.b/c.png"}, "the image https://a.b/c.png is on the network; download it"),
        ({"images": [5]}, "an image must be the name of a file, got int"),
        ({"image": "data:image/png;base64,!!"}, "an image is a data URL without base64"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(folder: Path, row: Any, reason: str) -> None:
    data = write(folder, "bad.json", [{**llava(1, folder), **row}])
    with pytest.raises(ConfigError) as caught:
        read_rows(data, "--data", "line")
    assert str(caught.value).startswith(f"{data}, entry 1: {reason}")


def test_mistakes_with_images(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(rows: list[Any], *more: str, model: Path = folder) -> str:
        data = write(folder, "mistake.json", rows)
        capsys.readouterr()
        assert main(words(model, data, tmp_path / "out", "--dry-run", "--devices", "cpu", *more)) == 2
        return capsys.readouterr().err

    good = [llava(0, folder)]
    assert "--truncate cannot be used with images" in refusal(good, "--truncate")
    assert "more than --seq-len 20" in refusal(good, "--seq-len", "20")
    save_model(tmp_path / "model")
    assert "has no processor of images" in refusal(good, model=tmp_path)
    turns = [*llava(0, folder)["conversations"], {"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]
    several = {"conversations": turns, "image": "0.png"}
    assert "entry 1: of 4 messages beside images, 2 are the assistant's; one alone can have a loss" in refusal(
        [several]
    )
    marks = [{"from": "human", "value": "<image><image>a"}, {"from": "gpt", "value": "b"}]
    message = refusal([{"conversations": marks, "image": "0.png"}])
    assert "entry 1: the row cannot be rendered: Number of images provided (1) does not match" in message
    (folder / "broken.png").write_bytes(b"no image")
    assert "entry 1: the row cannot be rendered: " in refusal([{**llava(1, folder), "image": "broken.png"}])
    pairs = [{"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b", "image": "0.png"}]
    assert "entry 1: preference pairs beside images cannot be trained here" in refusal(pairs, "--method", "dpo")
