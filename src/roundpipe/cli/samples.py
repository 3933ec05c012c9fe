"""The file of `--samples`: prompts as lines of text, or as JSON lines with text or messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundpipe.errors import ConfigError

_MOST = 64
_ENDINGS = (".txt", ".jsonl")


def read_prompts(path: Path, *, are_chats: bool) -> list[str | list[dict[str, Any]]]:
    """The prompts of a file. Raises ConfigError with the line at fault.

    are_chats: whether the data are messages; a prompt that is text is then the message of a user.
    """
    if path.suffix not in _ENDINGS:
        raise ConfigError(f"--samples {path} must be a .txt file with a prompt per line, or a .jsonl file.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may have other ends of lines inside of strings
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--samples: cannot read {path}: {error}.") from error
    is_json = path.suffix == ".jsonl"
    prompts = [
        _prompt(line, f"--samples {path}, line {number}") if is_json else line.strip()
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not 0 < len(prompts) <= _MOST:
        raise ConfigError(
            f"--samples {path} has {len(prompts)} prompts; give 1 to {_MOST}: all are answered at each evaluation."
        )
    if not are_chats:
        return prompts
    return [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]


def _prompt(line: str, place: str) -> str | list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: the line is no JSON: {error}.") from error
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, Sequence) and prompt and all(map(_is_message, prompt)):
        return list(prompt)
    raise ConfigError(
        f'{place}: a line needs "prompt", a text that is not empty or a list of messages with "role" and "content" as '
        "text."
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))
