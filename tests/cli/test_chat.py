"""`roundpipe chat` through pipes: answers are those of the plain model, /reset, Ctrl-C, adapters, mistakes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import new_tokenizer, save_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    set_seed,
)

import roundpipe.cli.chat as chat_module
from roundpipe.__main__ import main

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder / "model", chat_template=TEMPLATE, initializer_range=0.5)
    save_model(folder / "base", chat_template=None, initializer_range=0.5)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    model.save_pretrained(folder / "adapter")
    return folder


Chat = Callable[..., str]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Sends lines to a chat and returns what it writes to stdout."""

    def talk(text: str, *more: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        capsys.readouterr()
        assert main(["chat", *more, "--devices", "cpu"]) == 0
        return capsys.readouterr().out

    return talk


def plain_answer(model: Any, folder: Path, *turns: str, num_new: int = 12, system: str | None = None) -> list[str]:
    """The answers of a plain model to several messages of one conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages, answers = [] if system is None else [{"role": "system", "content": system}], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            tokens = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=num_new,
                do_sample=False,
            )  # fmt: skip
        reply = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
        answers.append(reply)
    return answers


def greedy(num_new: int = 12) -> list[str]:
    return ["--temperature", "0", "--max-new-tokens", str(num_new)]


def test_answers_are_those_of_the_plain_model_and_the_conversation_goes_on(folder: Path, chat: Chat) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    first, second = plain_answer(model, folder / "model", "hello", "more?")
    assert first != second
    assert chat("hello\n\nmore?\n", str(folder / "model"), *greedy()) == f"{first}\n{second}\n"


def test_reset_begins_a_new_conversation_with_the_system_message(folder: Path, chat: Chat) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    first, second = plain_answer(model, folder / "model", "hello", "hello", system="be short")
    assert first != second
    given = [str(folder / "model"), *greedy(), "--system", "be short"]
    assert chat("hello\n/reset\nhello\nhello\n/exit\nunheard\n", *given) == f"{first}\n{first}\n{second}\n"


def test_an_adapter_answers_as_peft_does(folder: Path, chat: Chat) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    (of_base,) = plain_answer(base, folder / "model", "hello")
    (wanted,) = plain_answer(PeftModel.from_pretrained(base, folder / "adapter").eval(), folder / "model", "hello")
    assert wanted != of_base
    assert chat("hello\n", str(folder / "adapter"), *greedy()) == f"{wanted}\n"


def test_a_temperature_samples_by_the_seed(folder: Path, chat: Chat) -> None:
    given = [str(folder / "model"), "--temperature", "2", "--max-new-tokens", "12"]
    one, same, other = (chat("hello\n", *given, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == same != other


def test_ctrl_c_stops_the_answer_and_what_there_is_of_it_stays(
    folder: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    wanted = plain_answer(model, folder / "model", "hello", "more?", num_new=3)
    make, seen = chat_module._streamer, []

    def streamer(tokenizer: Any) -> Any:
        made = make(tokenizer)
        put = made.put

        def strike(tokens: torch.Tensor) -> None:
            put(tokens)
            seen.append(tokens)
            if len(seen) in (3, 7):  # the prompt and two tokens; the third one is made before the answer stops
                os.kill(os.getpid(), signal.SIGINT)

        made.put = strike
        return made

    monkeypatch.setattr(chat_module, "_streamer", streamer)
    answers = chat("hello\nmore?\n", str(folder / "model"), *greedy(60))
    assert len(seen) == 8
    assert answers == "".join(f"{answer}\n" for answer in wanted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_model_without_a_chat_template_continues_the_text(folder: Path, chat: Chat) -> None:
    tokenizer, model = (kind.from_pretrained(folder / "base") for kind in (AutoTokenizer, AutoModelForCausalLM))
    inputs = tokenizer("once upon", return_tensors="pt")
    tokens = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=9, do_sample=False
    )
    wanted = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert chat("once upon\n", str(folder / "base"), *greedy(9)) == f"{wanted}\n"


def test_a_conversation_that_is_too_long_is_said(
    folder: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 300 + "\n/reset\nhello\n/unknown\n"))
    assert main(["chat", str(folder / "model"), "--devices", "cpu", *greedy(4)]) == 0
    written = capsys.readouterr()
    assert "the conversation has 318 tokens, and the model takes 256; type /reset" in written.err
    assert "there is no command /unknown" in written.err
    (wanted,) = plain_answer(
        AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "model", "hello", num_new=4
    )
    assert written.out == f"{wanted}\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["/no/where"], "cannot load the tokenizer of /no/where: there is no such folder, and from the hub: "),
        (["{}/model", "--base", "{}/model"], "--base is for adapters"),
        (["{}/adapter", "--base", "/no/where"], "cannot load the tokenizer of /no/where"),
        (["{}/base", "--system", "x"], "--system needs a chat template"),
        (["{}/model", "--temperature", "-1"], "--temperature must not be negative, got -1"),
        (["{}/model", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["{}/model", "--devices", "gpu"], "cannot read 'gpu'"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert main(["chat", *(word.format(folder) for word in words)]) == 2
    assert part in capsys.readouterr().err


def test_a_model_that_sees_images_answers_text(tmp_path: Path, chat: Chat) -> None:
    sizes: dict[str, int] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2}
    text = LlamaConfig(vocab_size=272, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, **sizes)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    set_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=270, vision_feature_layer=-1)
    )
    model.save_pretrained(tmp_path)
    new_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    (expected,) = plain_answer(model.eval(), tmp_path, "Hello?")
    assert chat("Hello?\n", str(tmp_path), *greedy()) == f"{expected}\n"


def test_the_adapter_of_a_classifier_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    get_peft_model(base, LoraConfig(r=2, task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    for words in (
        ["chat", str(tmp_path / "adapter")],
        ["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "m")],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "is the adapter of a classifier or reward model" in said
        assert "AutoPeftModelForSequenceClassification" in said
