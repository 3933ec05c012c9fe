"""Draws what ran when on each device in one training call, as an SVG. The picture in docs/how-it-works.md is made so:

    OMP_NUM_THREADS=1 python tools/draw_timeline.py docs/assets/timeline.svg

Trains six equal layers in five tasks on two virtual devices with four microbatches, and draws the call in which the
devices were idle for the shortest time: other processes disturb the others. Nothing but `model.timeline()` is drawn.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.timeline import Span, Timeline

NUM_CALLS = 30
WIDTH, LEFT, RIGHT, ROW, GAP, TOP, BOTTOM = 760, 64, 16, 48, 12, 40, 46
COLOURS = {"F": "#3f6fd8", "FB": "#7b4bb3", "B": "#c8641b"}
MEANINGS = {"F": "forward", "FB": "forward, loss, backward", "B": "recompute, backward"}


def measured_timeline() -> Timeline:
    """The timeline of one call of a small model."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)))
    plan = ModelExecutePlan(
        fwd_plan=[range(0, 2), range(2, 4)], bwd_plan=[range(4, 6), range(2, 4), range(0, 2)]
    )  # tasks F0, F1, FB2, B3, B4
    config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean", execute_plan=plan)
    points = torch.randn(4096, 1024)
    timelines = []
    with RoundPipe(network, model_run_config=config, devices=["cpu"] * 2) as model:
        optimizer = optim.AdamW(model.optim_parameters(), lr=1e-3)
        for _ in range(NUM_CALLS):
            model.forward_backward((points,), label=points, loss_fn=nn.functional.mse_loss)
            model.step(optimizer.step, is_async=False)
            model.synchronize()
            timelines.append(model.timeline())
    return min(timelines[1:], key=lambda line: sum(map(line.idle_share, line.devices())))


def kind_of(span: Span) -> str:
    return span.label.rstrip("0123456789")


def drawing(timeline: Timeline) -> str:
    """The SVG of a timeline: a row per device, a box per task and microbatch, a scale in milliseconds."""
    devices = sorted(timeline.devices())
    height = TOP + len(devices) * (ROW + GAP) + BOTTOM
    per_s = (WIDTH - LEFT - RIGHT) / timeline.duration_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + number * 220
        parts.append(f'<rect x="{x}" y="14" width="14" height="14" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="26" fill="#222222">{kind}: {MEANINGS[kind]}</text>')
    for row, device in enumerate(devices):
        y = TOP + row * (ROW + GAP)
        parts.append(f'<text x="12" y="{y + ROW / 2 + 5}" fill="#222222">{escape(device)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" fill="#eeeeee"/>')
        for span in timeline.spans:
            if span.device == device:
                parts += box(span, LEFT + (span.start_s - timeline.start_s) * per_s, y, per_s)
    return "\n".join([*parts, *scale(timeline, per_s, height), "</svg>", ""])


def box(span: Span, x: float, y: float, per_s: float) -> list[str]:
    width = (span.end_s - span.start_s) * per_s
    middle = x + width / 2
    size = f'width="{max(width - 1, 1):.1f}" height="{ROW}"'
    shape = f'<rect x="{x:.1f}" y="{y}" {size} rx="2" fill="{COLOURS[kind_of(span)]}"/>'
    if width < 26:  # too narrow for text
        return [shape]
    white = f'<text x="{middle:.1f}" fill="#ffffff" text-anchor="middle"'
    return [
        shape,
        f'{white} y="{y + 21}">{escape(span.label)}</text>',
        f'{white} y="{y + 37}" font-size="11">m{span.microbatch}</text>',
    ]


def scale(timeline: Timeline, per_s: float, height: float) -> list[str]:
    step_ms = next(
        step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if timeline.duration_s * 1e3 / step <= 10
    )
    parts = []
    for tick in range(0, int(timeline.duration_s * 1e3) + 1, step_ms):
        x = LEFT + tick / 1e3 * per_s
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height - BOTTOM}" y2="{height - BOTTOM + 6}" stroke="#666666"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{height - 20}" fill="#444444" text-anchor="middle" font-size="11">{tick} ms</text>'
        )
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.file.write_text(drawing(measured_timeline()), encoding="utf-8")
