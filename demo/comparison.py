"""What the runs of the demo show: comparisons of losses and weights, answers; each as a section of the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from demo.chats import answer, training_and_held_out_pairs
from demo.plain_loop import Recipe, plain_losses
from roundpipe.report.charts import Curve
from roundpipe.report.metrics import METRICS_FILE, RunRecord, read_metrics
from roundpipe.report.page import Section

CLOSE_LOSSES = 20  # losses that must be close to the plain loop's; training amplifies differences of rounding later
CLOSE = 1e-5


@dataclass(frozen=True)
class Finding:
    """A section of the report with its verdict, and whether the promise that it checks holds."""

    holds: bool
    section: Section


def compare_with_undisturbed(resumed: Path, undisturbed: Path, lost: dict[int, float]) -> Finding:
    """Whether a killed and resumed run has the losses and final weights of an undisturbed one, bit for bit."""
    losses, expected = losses_of(resumed), losses_of(undisturbed)
    weights, expected_weights = weights_of(resumed), weights_of(undisturbed)
    other_losses = [step for step in expected | losses if losses.get(step) != expected.get(step)]
    other_lost = [step for step, loss in lost.items() if loss != expected.get(step)]
    names = expected_weights | weights
    other_weights = [name for name in names if not same_bits(weights.get(name), expected_weights.get(name))]
    holds = not (other_losses or other_lost or other_weights)
    first, second = (number_of_devices(start["devices"]) for start in RunRecord.read(resumed).starts)
    verdict = (
        f"Killed at step {max(lost)} with {first} and resumed with {second}, the run has the {len(expected)} losses "
        f"and the {len(expected_weights)} weight tensors of the undisturbed run, bit for bit."
    )
    if not holds:
        verdict = (
            f"The killed and resumed run DIFFERS from the undisturbed one: losses of steps {other_losses}, "
            f"of lost steps {other_lost}, weights {other_weights}."
        )
    return Finding(
        holds,
        Section(
            "Killed and resumed",
            verdict,
            f"SIGKILL ended the first process at step {max(lost)}. Steps {min(lost)} to {max(lost)} were in no "
            "checkpoint; the second process repeated them. The dashed line in the curves is the "
            "restart. The undisturbed run had the same command in another folder.",
            {
                "losses compared": len(expected),
                "losses that differ": len(other_losses),
                "steps done twice": f"{min(lost)} to {max(lost)}",
                "weights compared": f"{sum(weight.numel() for weight in expected_weights.values()):,}",
                "weight tensors that differ": len(other_weights),
                "final loss of both": f"{losses[max(losses)]!r} and {expected[max(expected)]!r}",
            },
        ),
    )


def compare_with_plain(run: Path, model: Path, data: Path, recipe: Recipe, device: str) -> Finding:
    """Whether a run has the losses of the same training in plain PyTorch, but for rounding."""
    losses = list(losses_of(run).values())
    plain = plain_losses(model, data, recipe, device, num_step=recipe.steps, is_stale=False)
    differences = [abs(a - b) for a, b in zip(losses, plain, strict=True)]
    early = differences[:CLOSE_LOSSES]
    holds = all(difference <= CLOSE for difference in early)
    verdict = (
        f"The losses {'are those of' if holds else 'DIFFER from'} plain PyTorch: the first {len(early)} differ by at "
        f"most {max(early):.1g} (allowed: {CLOSE:g}), all {len(losses)} by at most {max(differences):.1g}."
    )
    text = (
        f"The plain loop trains the same weights on {device} with torch.optim.AdamW, the same batches, schedule and "
        "clipping. It computes each batch at once, RoundPipe in microbatches, so float32 rounds differently."
    )
    table: list[list[object]] = [["step", "loss of roundpipe train", "loss of plain PyTorch", "difference"]]
    for step in spread(len(losses)):
        table.append([step, losses[step - 1], plain[step - 1], f"{differences[step - 1]:.1g}"])
    curve = Curve("plain PyTorch", range(1, len(plain) + 1), plain)
    return Finding(holds, Section("Plain PyTorch", verdict, text, table, [curve]))


def compare_with_stale(stale: Path, exact: Path, model: Path, data: Path, recipe: Recipe, device: str) -> Finding:
    """Whether a run with --stale has the losses of a plain loop whose gradients come from weights one update old."""
    losses, exact_losses = list(losses_of(stale).values()), list(losses_of(exact).values())
    plain = plain_losses(model, data, recipe, device, num_step=CLOSE_LOSSES, is_stale=True)
    differences = [abs(a - b) for a, b in zip(losses[:CLOSE_LOSSES], plain, strict=True)]
    holds = all(difference <= CLOSE for difference in differences)
    verdict = (
        f"The losses with --stale {'are those of' if holds else 'DIFFER from'} plain PyTorch with gradients of weights "
        f"one update old: the first {len(plain)} differ by at most {max(differences):.1g} (allowed: {CLOSE:g})."
    )
    text = (
        "With --stale the optimizer runs while the next step computes. This is another training algorithm: it learns "
        "more slowly, above all at high learning rates."
    )
    table: list[list[object]] = [["step", "loss with exact steps", "loss with --stale"]]
    table += [[step, f"{exact_losses[step - 1]:.4f}", f"{losses[step - 1]:.4f}"] for step in spread(len(losses))]
    curve = Curve("with --stale", range(1, len(losses) + 1), losses)
    return Finding(holds, Section("Exact and stale steps", verdict, text, table, [curve]))


def answers(model_folder: Path, num_question: int | None = None) -> Finding:
    """Whether transformers loads the result. Asks the model questions that were held out from training (all)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    pairs = training_and_held_out_pairs()[1][:num_question]
    table = [["question", "answer of the model"]]
    num_right = 0
    for number, (question, expected) in enumerate(pairs):
        given = answer(model, tokenizer, question["content"])
        num_right += given == expected["content"]
        if number % 5 == 0:
            table.append([question["content"], given])
            print(f"  {question['content']}  ->  {given}", flush=True)
    wrong_keys = {kind: sorted(keys) for kind, keys in loading.items() if keys}
    verdict = (
        "from_pretrained of transformers loads the output folder without missing or unexpected keys. The model answers "
        f"{num_right} of {len(pairs)} questions right that it was not trained on."
    )
    if wrong_keys:
        verdict = f"from_pretrained of transformers finds WRONG KEYS in the output folder: {wrong_keys}."
    text = "Training had the same facts with other questions, and the same questions about other people."
    return Finding(not wrong_keys, Section("What the model has learnt", verdict, text, table))


def number_of_devices(devices: list[str]) -> str:
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}"


def losses_of(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder / METRICS_FILE) if row["type"] == "train"}


def spread(num_step: int, count: int = 5) -> list[int]:
    """A few steps from the first to the last."""
    return [1 + part * (num_step - 1) // (count - 1) for part in range(count)]


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
