"""samples.jsonl, the answers of a model to a few prompts over the steps of its training, and how a report shows them.

A row has `step`, `number` of the prompt, `prompt` (text or messages), `answer`, `tokens`, `is_complete` and `time`.
Knows no model.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from roundpipe.report.metrics import Row

SAMPLES_FILE = "samples.jsonl"
_MOST_STEPS = 5  # beside each other in a page: as many as fit on a desktop
_LONGEST_TEXT = 4000  # characters in a page


def of_this_run(rows: Sequence[Row], starts: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows that belong to the run: not those of steps that a later process has taken again, or of another run."""

    def belongs(row: Row) -> bool:
        return all(row.get("time", 0.0) >= start["time"] or 0 < row["step"] <= start["step"] for start in starts)

    return [row for row in rows if {"step", "number", "prompt", "answer"} <= row.keys() and belongs(row)]


def prompt_text(prompt: Any) -> str:
    """A prompt as text: of messages the last one of the user, or all with their roles if there are several."""
    if isinstance(prompt, str):
        return prompt
    messages = [each for each in prompt if isinstance(each, Mapping)]
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in messages)


def samples_html(rows: Sequence[Row]) -> str:
    """The answers of each prompt beside each other, from the first to the last step; empty without rows."""
    by_prompt: dict[int, dict[int, Row]] = {}
    for row in rows:
        by_prompt.setdefault(row["number"], {})[row["step"]] = row
    parts = []
    for _, answers in sorted(by_prompt.items()):
        steps = _spread(sorted(answers))
        cards = "".join(_card(answers[step]) for step in steps)
        prompt = _short(prompt_text(answers[steps[-1]]["prompt"]))
        parts.append(f'<h3 class="prompt">{prompt}</h3><div class="scroll samples">{cards}</div>')
    num_steps = len({row["step"] for row in rows})
    about = f"<p>{_MOST_STEPS} of {num_steps:,} steps, evenly spread.</p>" if num_steps > _MOST_STEPS else ""
    return about + "".join(parts) if parts else ""


def _card(row: Row) -> str:
    tokens = f"{row['tokens']:,} tokens" if isinstance(row.get("tokens"), int) else ""
    cut = "" if row.get("is_complete", True) else ", cut"
    return f"<div><span>step {row['step']:,}</span><p>{_short(row['answer'])}</p><small>{tokens}{cut}</small></div>"


def _spread(steps: Sequence[int]) -> list[int]:
    """At most `_MOST_STEPS` steps, evenly spread, the first and the last one among them."""
    last = len(steps) - 1
    if last < _MOST_STEPS:
        return list(steps)
    return [steps[round(place * last / (_MOST_STEPS - 1))] for place in range(_MOST_STEPS)]


def _short(text: object) -> str:
    shown = str(text)
    return html.escape(shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}…")
