"""SamplesCallback: the model's answers to a few prompts at each evaluation, so that the user sees them change.

They are generated between two steps and leave no trace in the training: random generators, modes, gradients and moments
are as before. A failure ends the samples, not the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from roundpipe.api.roundpipe import RoundPipe
from roundpipe.errors import ConfigError, MachineError, StallError
from roundpipe.integrations.generation import GREEDY, end_tokens, stopping_if, tokens_of
from roundpipe.report.metrics import MetricsWriter
from roundpipe.report.samples import SAMPLES_FILE, prompt_text

logger = logging.getLogger("roundpipe")
Prompt = str | Sequence[Mapping[str, Any]]
_BATCH = 16  # prompts that are answered together
_LONGEST_LINE = 240  # characters of an answer in the log


class SamplesCallback(TrainerCallback):
    """Generates answers at each evaluation, at checkpoints if nothing is evaluated, and at the end of a complete run.

    They go to samples.jsonl in the output folder and, line by line, to `show`. Must come before the callback that
    writes the report.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        model: Any,
        tokenizer: Any,
        *,
        show: Callable[[str], object],
    ) -> None:
        """Raises ConfigError for a model that cannot answer, and for prompts that it cannot take."""
        _check_model(model)
        if tokenizer is None:
            raise ConfigError("samples need a tokenizer; give the trainer processing_class=tokenizer.")
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        self._prompts = list(prompts)
        self._max_new_tokens = max_new_tokens
        self._show = show
        self._folder: Path | None = None  # of the run; None while nothing trains
        self._last_step = 0  # whose answers there are
        self._tokens = [self._tokens_of(prompt, model) for prompt in prompts]

    def _tokens_of(self, prompt: Prompt, model: Any) -> list[int]:
        shown = prompt_text(prompt)[:60]
        if not isinstance(prompt, str) and not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(f"the sample {shown!r} has messages, but the tokenizer has no chat template; give text.")
        ids = tokens_of(prompt, self._tokenizer)
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not ids or (room is not None and len(ids) >= room):
            raise ConfigError(
                f"the sample {shown!r} has {len(ids)} tokens; it needs at least 1 and fewer than {room}, the model's "
                "number of positions."
            )
        return ids

    # Called by the Trainer.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._folder = Path(args.output_dir or ".")
        self._last_step = state.global_step
        self._write(self._folder, state.global_step, [])  # without answers of steps that are taken again

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._sample(state, kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.eval_strategy == "no":
            self._sample(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.load_best_model_at_end:  # else the weights are those of an earlier step, which has its samples
            self._sample(state, kwargs["model"])
        self._folder = None

    # Generating.

    def _sample(self, state: TrainerState, model: Any) -> None:
        """Generate, keep and show the answers of a step, unless there are some or the run is being stopped."""
        folder, step = self._folder, state.global_step
        if folder is None or step == self._last_step or not self._prompts or model.stop_requested:
            return
        self._last_step = step
        begun = time.monotonic()
        try:
            with _as_for_answers(model):
                rows = [row for at in range(0, len(self._tokens), _BATCH) for row in self._answers(model, at, step)]
        except (MachineError, StallError):
            raise
        except Exception as error:
            logger.error(
                "the samples of step %d failed: %s: %s. Training goes on without samples.",
                step,
                type(error).__name__,
                error,
            )
            self._prompts = []
            return
        if model.stop_requested:
            return  # the answers were cut
        self._write(folder, step, rows)
        self._show(f"step {step}  {len(rows)} samples in {time.monotonic() - begun:.1f} s")
        for row in rows:
            self._show(f"  {_one_line(prompt_text(row['prompt']))} -> {_one_line(row['answer'])}")

    def _answers(self, model: Any, start: int, step: int) -> list[dict[str, Any]]:
        """The rows of up to _BATCH prompts, which are padded on the left and answered together."""
        prompts, tokens = self._prompts[start : start + _BATCH], self._tokens[start : start + _BATCH]
        ends = end_tokens(model.generation_config, self._tokenizer)
        padding, width = ends.get("pad_token_id", 0), max(map(len, tokens))
        ids = torch.tensor([[padding] * (width - len(each)) + each for each in tokens])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in tokens])
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        most = self._max_new_tokens if room is None else min(self._max_new_tokens, room - width)
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=most,
            stopping_criteria=stopping_if(lambda: model.stop_requested),
            **GREEDY,
            **ends,
        )
        rows = []
        for number, (prompt, answer) in enumerate(zip(prompts, found[:, width:].tolist(), strict=True), start + 1):
            end = next((at for at, token in enumerate(answer) if token in ends.get("eos_token_id", ())), None)
            text = self._tokenizer.decode(answer[:end], skip_special_tokens=True)
            tokens_made = len(answer) if end is None else end
            row = {"step": step, "number": number, "prompt": prompt, "answer": text, "tokens": tokens_made}
            rows.append({**row, "is_complete": end is not None, "time": time.time()})
        return rows

    def _write(self, folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to samples.jsonl. Removes those of later steps. A failure is logged."""
        path = folder / SAMPLES_FILE
        try:
            with contextlib.closing(MetricsWriter(path, resumed_step=step)) as writer:
                for row in rows:
                    writer.write(row)
        except OSError as error:
            logger.error("%s misses the samples of step %d: %s.", path, step, error)


def _check_model(model: Any) -> None:
    """Raise ConfigError for a model whose answers to a prompt cannot be generated."""
    plain = model.original_model
    base = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    adapter = getattr(plain, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigError(f"samples cannot be generated with a {adapter.peft_type.value} adapter; leave them out.")
    can_answer = isinstance(model, RoundPipe) and model._engine.split_model is not None
    if not can_answer or not getattr(base, "can_generate", bool)() or base.config.is_encoder_decoder:
        raise ConfigError(
            f"samples need a causal language model of transformers that is split into layers, got "
            f"{type(base).__name__}, which cannot answer prompts; leave them out."
        )


@contextlib.contextmanager
def _as_for_answers(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards modes and the random generator are as before."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=()):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"
