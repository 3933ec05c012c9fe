"""The command `roundpipe chat`: a conversation with a model, or an adapter, on the terminal or through pipes.

Every line of the input is a message; answers go to the output token by token, everything else to stderr. The model's
own `generate` runs on the devices, where the weights stay during an answer if they fit.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from roundpipe.cli.adapters import ADAPTER_FILE, put_adapter, read_adapter_config
from roundpipe.devices import parse_devices
from roundpipe.errors import ConfigError
from roundpipe.integrations.generation import GREEDY, end_tokens, stopping_if
from roundpipe.loading import load, quantised_as

_HELP = "/reset begins a new conversation, /exit ends the chat; Ctrl-C stops an answer."


def run(words: Sequence[str]) -> int:
    """Chat until the input ends. Raises ConfigError for folders and options that cannot be used."""
    options = parser().parse_args(list(words))
    if options.temperature is not None and options.temperature < 0:
        raise ConfigError(f"--temperature must not be negative, got {options.temperature:g}; 0 takes the best token.")
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}.")
    specs = parse_devices(options.devices)
    plain, tokenizer = _load(options, "float32" if specs[0].kind == "cpu" else "bfloat16")
    if options.system is not None and not tokenizer.chat_template:
        raise ConfigError(f"--system needs a chat template, and the tokenizer of {options.model} has none.")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    from roundpipe.api.wrap import wrap_model_to_roundpipe

    with torch.no_grad():
        model: Any = wrap_model_to_roundpipe(plain, name="chat", devices=options.devices)
    try:
        _converse(Conversation(model, tokenizer, options))
    finally:
        model.close()
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="roundpipe chat",
        description=f"Chat with a model that may be larger than GPU memory. Every line is a message. {_HELP}",
    )
    parser.add_argument("model", metavar="MODEL_OR_ADAPTER", help="folder or name of a model, or folder of an adapter")
    parser.add_argument("--base", metavar="DIR", help="model of an adapter; default: the one that the adapter names")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer (default 512)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: always the best token; default: as the model's folder says"
    )
    parser.add_argument("--seed", type=int, help="of the sampling")
    parser.add_argument("--devices", help='such as "cuda:0"; default: all GPUs, else the CPU')
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: float32 on the CPU, else bfloat16")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that the model's folder has"
    )
    return parser


def _load(options: argparse.Namespace, dtype: str) -> tuple[Any, Any]:
    """The plain model, with its adapter if there is one, and the tokenizer: that of the adapter, if it has one."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    folder, name, of_tokenizer = Path(options.model), options.model, options.model
    is_adapter = (folder / ADAPTER_FILE).exists()
    if is_adapter:
        name = options.base or read_adapter_config(folder).get("base_model_name_or_path")
        if not name:
            raise ConfigError(f"{folder} does not name its model; give --base DIR.")
        of_tokenizer = options.model if any(folder.glob("tokenizer*")) else name
    elif options.base is not None:
        raise ConfigError(f"--base is for adapters, and {folder} has no {ADAPTER_FILE}; leave it out.")
    further = {"trust_remote_code": options.trust_remote_code}
    what = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(of_tokenizer, **further)
        what = "model"
        weights = getattr(torch, options.dtype or dtype)
        config = AutoConfig.from_pretrained(name, **further)
        if quantised_as(config, name) is None:
            reads_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or options.trust_remote_code
            kind = AutoModelForCausalLM if reads_text else AutoModelForImageTextToText  # of images: for text alone
            model = kind.from_pretrained(name, dtype=weights, **further)
        else:
            model = load(name, dtype=weights, **further)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        nowhere = "" if Path(name).exists() else "there is no such folder, and from the hub: "
        text = nowhere + " ".join(str(error).split())
        raise ConfigError(f"cannot load the {what} of {name}: {text}") from error
    if is_adapter:
        model, _ = put_adapter(model, folder, "--base")
    return model.eval().requires_grad_(False), tokenizer


class Conversation:
    """The messages so far, and answers to the next one."""

    def __init__(self, model: Any, tokenizer: Any, options: argparse.Namespace) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        config = model.config.get_text_config()
        self._most_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self.reset()

    def reset(self) -> None:
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str, stop: threading.Event) -> None:
        """Write the answer to a message token by token, until it is complete or `stop` is set.

        The message and what there is of its answer join the conversation.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        inputs = self._inputs(messages)
        length = inputs["input_ids"].shape[1]
        room = self._options.max_new_tokens if self._most_tokens is None else self._most_tokens - length
        if room < 1:
            _notice(f"the conversation has {length} tokens, and the model takes {self._most_tokens}; type /reset")
            return
        begun = time.monotonic()
        tokens = self._model.generate(
            **inputs,
            **self._sampling(),
            max_new_tokens=min(room, self._options.max_new_tokens),
            streamer=_streamer(self._tokenizer),
            stopping_criteria=stopping_if(stop.is_set),
        )
        new = tokens[0, length:]
        reply = self._tokenizer.decode(new, skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": reply}]
        sys.stdout.write("\n")
        sys.stdout.flush()
        if sys.stderr.isatty():
            _notice(f"{len(new)} tokens, {len(new) / (time.monotonic() - begun):.1f} tokens/s")

    def _inputs(self, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
        if self._tokenizer.chat_template:
            made = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:  # a model that only continues text
            made = self._tokenizer("\n".join(each["content"] for each in messages), return_tensors="pt")
        return {name: made[name] for name in ("input_ids", "attention_mask")}

    def _sampling(self) -> dict[str, Any]:
        """Options of generate() for the choice of tokens, and for the end of an answer."""
        temperature = self._options.temperature
        chosen: dict[str, Any] = {}
        if temperature == 0:
            chosen = dict(GREEDY)
        elif temperature is not None:
            chosen = {"do_sample": True, "temperature": temperature}
        return chosen | end_tokens(self._model.generation_config, self._tokenizer)


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class Writer(TextStreamer):
        """Writes text as soon as its tokens are complete characters."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

    return Writer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _notice(text: str) -> None:
    sys.stderr.write(f"({text})\n")
    sys.stderr.flush()


def _converse(conversation: Conversation) -> None:
    """Answer each line of the input until it ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited
        _notice(_HELP)
    for line in _lines(is_terminal=is_terminal):
        text = line.strip()
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/reset":
            conversation.reset()
            _notice("a new conversation")
        elif text.startswith("/") and " " not in text:
            _notice(f"there is no command {text}. {_HELP}")
        elif text:
            with _interrupts() as stop:
                conversation.answer(text, stop)


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """The lines of the input. On a terminal, Ctrl-C at the prompt ends them."""
    if not is_terminal:
        yield from sys.stdin
        return
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stderr.write("\n")
            return
        yield line


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets inside the block, instead of raising KeyboardInterrupt. A second Ctrl-C raises it."""
    stop = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
