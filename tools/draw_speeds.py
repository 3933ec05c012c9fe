"""Draws docs/assets/speeds.svg: speeds beside plain PyTorch, as measured, read from the tables of docs/benchmarks.md.

    python tools/draw_speeds.py

A test compares the picture with what this draws, so a new figure on the page asks for a new picture.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "assets" / "speeds.svg"
WIDTH, LEFT, RIGHT, ROW, TOP = 760, 330, 120, 30, 56
LARGEST = 1.5  # ratio at the end of the longest bar
SHARED, LIMITED, SLOW = "#3f6fd8", "#7b4bb3", "#c8641b"


class Bar(NamedTuple):
    """A row of the page that is drawn. work: how the page begins to describe it; label: its text in the picture."""

    heading: str
    work: str
    label: str
    colour: str


BARS = (
    Bar("Larger models", "LoRA of rank 16, 8B shape", "LoRA, 8B *", SHARED),
    Bar("Full training of a 1.7B shape", "16 sequences, 8 microbatches, stale", "all weights, 1.7B, stale", SHARED),
    Bar("Full training of a 1.7B shape", "16 sequences, 8 microbatches, exact", "all weights, 1.7B, exact", SHARED),
    Bar("Larger models", "LoRA of a 32B shape", "LoRA, 32B, exact, 24 GB allowed *", LIMITED),
    Bar(
        "Full training of a 1.7B shape",
        "16 sequences, 16 microbatches, 24 GB allowed, exact",
        "all weights, 1.7B, exact, 24 GB allowed",
        LIMITED,
    ),
    Bar(
        "Full training of a 1.7B shape",
        "4 sequences, 4 microbatches, exact",
        "all weights, 1.7B, exact, a quarter of the tokens",
        SLOW,
    ),
)


NOTES = (
    "Measured on one H200 on 2026-11-16, each bar and its plain run in one call. Sequences of 4096 tokens,",
    "bfloat16 weights, Adam in float32, gradients not clipped. * plain PyTorch with recomputation.",
)


def figures(page: str, bar: Bar) -> tuple[float, str]:
    """The ratio to plain PyTorch of a row, and the GPU memory that it took."""
    section = page.partition(f"\n## {bar.heading}\n")[2].partition("\n## ")[0]
    cells = next(row for row in rows_of(section) if bar.work in row[1])
    ratio = re.match(r"\d\.\d+(?= of )", cells[3])
    assert ratio is not None, cells
    return float(ratio[0]), cells[4]


def rows_of(section: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def drawing(page: str) -> str:
    height = TOP + len(BARS) * ROW + 16 * len(NOTES) + 20
    per_unit = (WIDTH - LEFT - RIGHT) / LARGEST
    plain = LEFT + per_unit
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" fill="#222222">',
        "<title>Speed beside plain PyTorch with everything in GPU memory, measured on one H200</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="16" y="24" font-weight="bold">Speed beside plain PyTorch with everything in GPU memory</text>',
        f'<text x="{WIDTH - 16}" y="{TOP - 8}" text-anchor="end" fill="#666666" font-size="11">GPU memory</text>',
        f'<text x="{plain:.1f}" y="{TOP - 8}" text-anchor="middle" fill="#666666" font-size="11">plain</text>',
    ]
    for number, bar in enumerate(BARS):
        ratio, memory = figures(page, bar)
        y = TOP + number * ROW
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 19}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{ratio * per_unit:.1f}" height="{ROW - 8}" rx="2" '
            f'fill="{bar.colour}"/>',
            f'<text x="{LEFT + 8}" y="{y + 19}" fill="#ffffff" font-weight="bold">{ratio:g}</text>',
            f'<text x="{WIDTH - 16}" y="{y + 19}" text-anchor="end">{escape(memory)}</text>',
        ]
    bottom = TOP + len(BARS) * ROW
    parts += [
        f'<line x1="{plain:.1f}" x2="{plain:.1f}" y1="{TOP}" y2="{bottom}" stroke="#222222" stroke-dasharray="4 3"/>',
        *(
            f'<text x="16" y="{bottom + 22 + 16 * number}" fill="#666666" font-size="11">{line}</text>'
            for number, line in enumerate(NOTES)
        ),
        "</svg>",
    ]
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    PICTURE.write_text(drawing((DOCS / "benchmarks.md").read_text(encoding="utf-8")), encoding="utf-8")
