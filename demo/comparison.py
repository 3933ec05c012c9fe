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
            "checkpoint; the second process repeated them, with the same losses. The dashed line in the curves is the "
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
    early, largest = max(differences[:CLOSE_LOSSES]), max(differences)
    count = len(differences[:CLOSE_LOSSES])
    verdict = (
        f"The losses are those of plain PyTorch: the first {count} differ by at most {early:.1g} (allowed: {CLOSE:g}), "
        f"all {len(losses)} by at most {largest:.1g}."
    )
    if early > CLOSE:
        verdict = f"The first {count} losses DIFFER from plain PyTorch by up to {early:.1g} (allowed: {CLOSE:g})."
    return Finding(
        early <= CLOSE,
        Section(
            "Plain PyTorch",
            verdict,
            f"The plain loop trains the same weights on {device} with torch.optim.AdamW, the same batches, schedule "
            "and clipping. It computes each batch at once, RoundPipe in microbatches, so float32 rounds differently.",
            losses=[Curve("plain PyTorch", range(1, len(plain) + 1), plain)],
        ),
    )


def compare_with_stale(stale: Path, exact: Path, model: Path, data: Path, recipe: Recipe, device: str) -> Finding:
    """Whether a run with --stale has the losses of a plain loop whose gradients come from weights one update old."""
    losses, exact_losses = losses_of(stale), losses_of(exact)
    plain = plain_losses(model, data, recipe, device, num_step=CLOSE_LOSSES, is_stale=True)
    difference = max(abs(a - b) for a, b in zip(losses.values(), plain, strict=False))
    relation = "equals" if difference <= CLOSE else "DIFFERS from"
    verdict = (
        f"A step with --stale {relation} a step of plain PyTorch with gradients of weights one update old: the first "
        f"{len(plain)} losses differ by at most {difference:.1g} (allowed: {CLOSE:g})."
    )
    return Finding(
        difference <= CLOSE,
        Section(
            "Exact and stale steps",
            verdict,
            "--stale lets the optimizer run while the next step computes. This is another training algorithm: it "
            "learns more slowly, above all at high learning rates. Mean of the last 10 losses: "
            f"{mean_of_last(exact_losses):.4f} exact, {mean_of_last(losses):.4f} stale.",
            losses=[Curve("with --stale", list(losses), list(losses.values()))],
        ),
    )


def answers(model_folder: Path, num_question: int | None = None) -> Finding:
    """Whether transformers loads the result. Asks the model questions that were held out from training (all)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    table = [["question", "answer of the model", "right"]]
    for number, (question, expected) in enumerate(training_and_held_out_pairs()[1][:num_question]):
        given = answer(model, tokenizer, question["content"])
        table.append([question["content"], given, "yes" if given == expected["content"] else "no"])
        if number % 5 == 0:
            print(f"  {question['content']}  ->  {given}", flush=True)
    right = sum(row[-1] == "yes" for row in table)
    wrong_keys = {kind: sorted(keys) for kind, keys in loading.items() if keys}
    verdict = (
        "from_pretrained of transformers loads the output folder without missing or unexpected keys. The model answers "
        f"{right} of {len(table) - 1} questions right that it was not trained on."
    )
    if wrong_keys:
        verdict = f"from_pretrained of transformers finds WRONG KEYS in the output folder: {wrong_keys}."
    text = "Training had the same facts with other questions, and the same questions about other people."
    return Finding(not wrong_keys, Section("What the model has learnt", verdict, text, table))


def number_of_devices(devices: list[str]) -> str:
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}"


def losses_of(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder / METRICS_FILE) if row["type"] == "train"}


def mean_of_last(losses: dict[int, float], count: int = 10) -> float:
    last = list(losses.values())[-count:]
    return sum(last) / len(last)


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
