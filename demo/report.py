"""The demo's results as text.

Knows measured values and how to print them. Measures only the memory of the process.
"""

from __future__ import annotations

import resource
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from demo.meter import Meter


@dataclass(frozen=True)
class Comparison:
    """Largest differences between a run and the plain run; zero means equal bit for bit."""

    loss_difference: float
    weight_difference: float

    @property
    def same_bits(self) -> bool:
        return self.loss_difference == 0 and self.weight_difference == 0


def compare(plain: Meter, plain_model: nn.Module, other: Meter, other_model: nn.Module) -> Comparison:
    """Compare all losses, and the weights after the last step."""
    pairs = zip(plain_model.state_dict().values(), other_model.state_dict().values(), strict=True)
    return Comparison(
        loss_difference=max(abs(a - b) for a, b in zip(plain.losses, other.losses, strict=True)),
        weight_difference=max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs),
    )


def peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_devices(devices: list[str]) -> str:
    kinds = [f"{count} x {name}" for name, count in Counter(devices).items()]
    virtual = " (virtual devices)" if all(name == "cpu" for name in devices) else ""
    return ", ".join(kinds) + virtual


def exact_verdict(exact: Comparison, on_cpu: bool) -> str:
    largest = (
        f"largest difference of a loss {exact.loss_difference:.3g}, of a weight after the last step "
        f"{exact.weight_difference:.3g}"
    )
    if exact.same_bits:
        return f"RoundPipe exact equals plain PyTorch bit for bit ({largest})."
    if on_cpu:
        return f"RoundPipe exact DIFFERS from plain PyTorch ({largest}); on the CPU in float32 they must be equal."
    return f"RoundPipe exact against plain PyTorch, whose optimizer ran on the GPU: {largest}."


def async_verdict(exact: Meter, stale: Meter, stale_difference: float, num_compared: int) -> list[str]:
    gap = stale.final_loss() - exact.final_loss()
    return [
        "RoundPipe async against a plain loop whose weights are one update old: largest difference of the first "
        f"{num_compared} losses {stale_difference:.3g}.",
        f"Its final loss is {abs(gap):.3f} {'above' if gap > 0 else 'below'} that of exact: weights that are one "
        "update old slow down convergence, mostly early in a run and at high learning rates.",
    ]


def indented(text: str) -> list[str]:
    """The lines of `text`, indented; long lines are wrapped."""
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 96, initial_indent="    ", subsequent_indent="    ") or [""]
    return lines


def write_report(
    runs: list[Meter], verdicts: list[str], devices: list[str], num_parameter: int, num_microbatch: int, sample: str
) -> str:
    rows = [f"{'run':18}{'first loss':>12}{'final loss':>12}{'tokens/s':>12}   weights a step computes with"]
    notes = ["current", "current", "one update old"]
    for run, note in zip(runs, notes, strict=True):
        rows.append(f"{run.name:18}{run.losses[0]:12.4f}{run.final_loss():12.4f}{run.tokens_per_s():12,.0f}   {note}")
    width = max(len(row) for row in rows)
    on_cpu = all(name == "cpu" for name in devices)
    lines = [
        "RoundPipe demo",
        "",
        f"devices           {describe_devices(devices)}, {num_microbatch} microbatches",
        f"model             {num_parameter:,} float32 parameters, {len(runs[0].losses)} steps a run",
        f"peak host memory  {peak_host_bytes() / 1e6:,.0f} MB (the whole process: torch, all three models)",
        f"torch             {torch.__version__}, threads inside an operator: {torch.get_num_threads()}",
        "",
        rows[0],
        "-" * width,
        *rows[1:],
        "",
        "Final loss: mean of the last 10 steps.",
        *(
            ["Virtual devices share the same cores: they show the order of the work and its results, not its speed."]
            * on_cpu
        ),
        *verdicts,
        "",
        "Sample text of the model after the exact run:",
        "",
        *indented(sample),
    ]
    return "\n".join(lines) + "\n"
