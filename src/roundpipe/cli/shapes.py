"""The forms in which people keep rows, and their conversion to the columns that TRL reads.

Knows keys of rows, never files, tokenizers and models.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_USER, _ASSISTANT, _SYSTEM, _TOOL = "user", "assistant", "system", "tool"
_ROLES = {
    **dict.fromkeys(("human", "user"), _USER),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant"), _ASSISTANT),
    "system": _SYSTEM,
    **dict.fromkeys(("tool", "observation", "function_response"), _TOOL),
}
_CALL = "function_call"  # ShareGPT's role for a call of a tool; its value is the call as JSON
_PROMPT = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"


_OF_CHATS = ("tools", "chat_template_kwargs")  # TRL passes these to the chat template


class RowFormat(enum.Enum):
    """What a row consists of, by the columns that TRL reads. Decides which of its tokens have a loss.

    columns: the keys that every row has. optional_columns: those that rows may have. Others are ignored, but for
    prompts, whose other columns rewards get.
    """

    TEXT = (("text",),)  # all tokens
    PROMPT_COMPLETION = (("prompt", "completion"), (*_OF_CHATS, "images"))  # the completion
    MESSAGES = (("messages",), (*_OF_CHATS, "images"))  # the assistant's messages
    TOKENS = (("input_ids",), ("labels",))  # tokenized already: as its labels say, else all tokens
    PREFERENCE = (("chosen", "rejected"), ("prompt", "margin", *_OF_CHATS))  # both answers
    UNPAIRED = (("prompt", "completion", "label"), _OF_CHATS)  # the completion
    LABELLED = (("text", "label"),)  # no token: the whole text
    PROMPT = (("prompt",),)  # what the model answers

    def __init__(self, columns: tuple[str, ...], optional_columns: tuple[str, ...] = ()) -> None:
        self.columns = columns
        self.optional_columns = optional_columns


class MisfitError(ValueError):
    """A row does not fit its form. The message is the reason."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A form of rows.

    name: as users force it.
    keys: a row that has all of these has this form.
    format: of the converted rows.
    converted: the row with the columns of the format; the same object if it has them already. Raises MisfitError.
    title: the form in words.
    """

    name: str
    keys: tuple[str, ...]
    format: RowFormat
    converted: Callable[[Row], Row]
    title: str

    @property
    def needs(self) -> str:
        return " and ".join(f"`{key}`" for key in self.keys)

    def is_form_of(self, row: Row) -> bool:
        return all(row.get(key) is not None for key in self.keys)


# Conversions.


def _as_is(row: Row) -> Row:
    return row


def _list_of(row: Row, key: str) -> Any:
    """The value of a key. Tables of text, such as .csv, have lists as JSON."""
    value = row[key]
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise MisfitError(f"`{key}` is not valid JSON: {error}") from error
    return value


def _with_lists(*keys: str) -> Callable[[Row], Row]:
    def converted(row: Row) -> Row:
        lists = {key: _list_of(row, key) for key in keys if row.get(key) is not None}
        return row if all(row[key] is value for key, value in lists.items()) else {**row, **lists}

    return converted


def _with_messages(*keys: str) -> Callable[[Row], Row]:
    """A conversion of rows in which these keys may have messages in place of text."""

    def converted(row: Row) -> Row:
        changes = {key: _messages(row[key], key) for key in keys if isinstance(row[key], list)}
        return row if all(row[key] is value for key, value in changes.items()) else {**row, **changes}

    return converted


def _messages_of(key: str) -> Callable[[Row], Row]:
    """A conversion of rows whose messages are in `key`, in OpenAI's or ShareGPT's keys, with an optional `system`."""

    def converted(row: Row) -> Row:
        given = _list_of(row, key)
        if not isinstance(given, list):
            raise MisfitError(f"`{key}` must be a list of messages with at least one entry")
        messages, system = _messages(given, key), _string_of(row, "system")
        if system and not (messages and isinstance(messages[0], Mapping) and messages[0].get("role") == _SYSTEM):
            messages = [{"role": _SYSTEM, "content": system}, *messages]
        return row if row.get("messages") is messages else {**row, "messages": messages}

    return converted


def _messages(given: list[Any], key: str) -> list[Any]:
    """The messages of a key with role and content; the same list if they have them already."""
    messages = [_message(each, f"message {number} of `{key}`") for number, each in enumerate(given, 1)]
    return given if all(one is other for one, other in zip(messages, given, strict=True)) else messages


def _message(given: Any, place: str) -> Any:
    """A message with role and content, both texts; the same object if it has them already.

    What is no message is left as it is: it is refused with the messages of other formats.
    """
    if not isinstance(given, Mapping):
        return given
    if given.get("weight") in (0, False):
        raise MisfitError(
            f"{place} has weight {given['weight']}: messages without loss are not supported here. Leave the weight "
            "out, or give rows with `input_ids` and `labels`"
        )
    if given.get("from") is not None:
        return _sharegpt_message(given, place)
    changes: dict[str, Any] = {}
    content = given.get("content")
    if isinstance(content, list):
        changes["content"] = _joined_text(content, place)
        if changes["content"] == content:
            del changes["content"]
    calls = given.get("tool_calls")
    if isinstance(calls, list) and any(_arguments_are_text(call) for call in calls):
        changes["tool_calls"] = [
            _call_with_object(call, place) if _arguments_are_text(call) else call for call in calls
        ]
    return {**given, **changes} if changes else given


def _sharegpt_message(given: Row, place: str) -> Row:
    role, value = given["from"], given.get("value")
    if isinstance(value, list):
        value = _joined_text(value, place)
    elif not isinstance(value, str):
        raise MisfitError(f"the value of {place} must be a string, got {type(value).__name__}")
    if role == _CALL:
        called = _parsed(str(value), f"the value of {place}")
        calls = called if isinstance(called, list) else [called]
        if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
            raise MisfitError(f'{place} must be a call such as {{"name": "f", "arguments": {{}}}}')
        return {
            "role": _ASSISTANT,
            "content": None,
            "tool_calls": [_call_with_object({"type": "function", "function": dict(call)}, place) for call in calls],
        }
    if role not in _ROLES:
        raise MisfitError(f"{place} is from {role!r}; use one of {', '.join((*_ROLES, _CALL))}")
    return {"role": _ROLES[role], "content": value}


def _joined_text(content: list[Any], place: str) -> str | list[Any]:
    """The text of a content list, joined as chat templates for such lists join it; the list itself if it has images."""
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    for kind, part in zip(kinds, content, strict=True):
        has_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
        if not has_text and kind != "image":
            raise MisfitError(f"the content of {place} has a part of type {kind}; only text and images can be trained")
    return content if "image" in kinds else "".join(part["text"] for part in content)


def _arguments_are_text(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), str)


def _call_with_object(call: Row, place: str) -> Row:
    """A tool call whose arguments are an object. OpenAI writes them as JSON, chat templates take the object."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of a tool call of {place}")
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MisfitError(f"{what} must be JSON: {error}") from error


def _string_of(row: Row, key: str, *, is_needed: bool = False) -> str:
    """The text of a key; empty if the row does not have it."""
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise MisfitError(f"`{key}` must be a string, got {type(value).__name__}")
    if is_needed and not (value or "").strip():
        raise MisfitError(f"`{key}` is empty")
    return value or ""


def _alpaca_to_messages(row: Row) -> Row:
    """One message of the user, with the input below the instruction; earlier turns are in `history`."""
    instruction, given = _string_of(row, "instruction", is_needed=True), _string_of(row, "input")
    system, answer = _string_of(row, "system"), _string_of(row, "output", is_needed=True)
    history = _list_of(row, "history") if row.get("history") is not None else []
    messages = [{"role": _SYSTEM, "content": system}] if system else []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise MisfitError("`history` must be a list of pairs, each with an instruction and its answer")
        messages += [{"role": _USER, "content": turn[0]}, {"role": _ASSISTANT, "content": turn[1]}]
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    messages += [{"role": _USER, "content": asked}, {"role": _ASSISTANT, "content": answer}]
    return {**row, "messages": messages}


def _alpaca_to_text(row: Row) -> Row:
    """The prompt of the Alpaca project, and the output."""
    for key in ("system", "history"):
        if row.get(key):
            raise MisfitError(
                f"`{key}` needs a tokenizer with a chat template; --chat-template-path FILE.jinja gives one"
            )
    instruction, given = _string_of(row, "instruction", is_needed=True), _string_of(row, "input")
    has_input = bool(given.strip())
    prompt = _PROMPT.format(
        paired=_PAIRED if has_input else "",
        instruction=instruction,
        input=f"### Input:\n{given}\n\n" if has_input else "",
    )
    return {**row, "prompt": prompt, "completion": _string_of(row, "output", is_needed=True)}


def _to_preference(row: Row) -> Row:
    """The question in `prompt`, which may be missing: it is then what both answers begin with.

    Answers are texts or messages; one message alone is a list of it. Beside answers of messages, a prompt that is text
    becomes a message, unless they have it already. The question may also be in ShareGPT's or Alpaca's keys.
    """
    if row.get("conversations") is not None:
        row = {**row, "prompt": _messages_of("conversations")(row)["messages"]}
    elif row.get("instruction") is not None:
        instruction, given = _string_of(row, "instruction", is_needed=True), _string_of(row, "input")
        row = {**row, "prompt": f"{instruction}\n\n{given}" if given.strip() else instruction}
    for key in ("chosen", "rejected"):
        if isinstance(row[key], Mapping):
            row = {**row, key: [row[key]]}
    keys = ("chosen", "rejected") if row.get("prompt") is None else ("prompt", "chosen", "rejected")
    row = _with_messages(*keys)(row)
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    has_messages = all(isinstance(answer, list) and answer for answer in (chosen, rejected))
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        answers = {key: [{"role": _ASSISTANT, "content": row[key]}] for key in ("chosen", "rejected")}
        return {**row, **answers}
    if not isinstance(prompt, str) or not has_messages:
        return row
    asked = {"role": _USER, "content": prompt}
    if chosen[0] == rejected[0] and isinstance(chosen[0], Mapping) and chosen[0].get("role") == _USER:
        if chosen[0].get("content") != prompt:
            raise MisfitError("`prompt` is not the first message of `chosen` and `rejected`; leave one of them out")
        return {**row, "prompt": [chosen[0]], "chosen": chosen[1:], "rejected": rejected[1:]}
    return {**row, "prompt": [asked]}


_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def _to_unpaired(row: Row) -> Row:
    """`label` is whether the completion is wanted: true or false, 1 or 0."""
    row, label = _with_messages("prompt", "completion")(row), row["label"]
    if isinstance(label, bool):
        return row
    wanted = _TRUTHS.get(str(label).strip().lower()) if isinstance(label, str | int) else None
    if wanted is None:
        raise MisfitError(f"`label` must be true or false, got {label!r}")
    return {**row, "label": wanted}


def _to_labelled(row: Row) -> Row:
    label = row["label"]
    if not isinstance(label, str | int) or label == "":
        raise MisfitError(f"`label` must be a name, a whole number, or true or false, got {label!r}")
    return row


_ALPACA = ("instruction", "output")
ALPACA_CHAT = Shape("alpaca", _ALPACA, RowFormat.MESSAGES, _alpaca_to_messages, "Alpaca's columns, as messages")
ALPACA_TEXT = Shape(
    "alpaca-text", _ALPACA, RowFormat.PROMPT_COMPLETION, _alpaca_to_text, "Alpaca's columns, in Alpaca's own prompt"
)
_SHAPES = (
    Shape("text", ("text",), RowFormat.TEXT, _as_is, "text"),
    Shape(
        "prompt-completion",
        ("prompt", "completion"),
        RowFormat.PROMPT_COMPLETION,
        _with_messages("prompt", "completion"),
        "prompt and completion",
    ),
    Shape("messages", ("messages",), RowFormat.MESSAGES, _messages_of("messages"), "messages"),
    Shape("sharegpt", ("conversations",), RowFormat.MESSAGES, _messages_of("conversations"), "ShareGPT conversations"),
    ALPACA_CHAT,
    ALPACA_TEXT,
    Shape("preference", ("chosen", "rejected"), RowFormat.PREFERENCE, _to_preference, "preference pairs"),
    Shape("unpaired", ("prompt", "completion", "label"), RowFormat.UNPAIRED, _to_unpaired, "single preferences"),
    Shape("labelled", ("text", "label"), RowFormat.LABELLED, _to_labelled, "texts with labels"),
    Shape("prompt", ("prompt",), RowFormat.PROMPT, _with_messages("prompt"), "prompts"),
    Shape("tokens", ("input_ids",), RowFormat.TOKENS, _with_lists("input_ids", "labels"), "input_ids"),
)
SHAPES = {shape.name: shape for shape in _SHAPES}


def shapes_to_recognize(names: Sequence[str], *, chats: bool) -> tuple[Shape, ...]:
    """The forms among which that of a row is looked for. `chats`: whether messages can be rendered."""
    without = ALPACA_TEXT if chats else ALPACA_CHAT
    return tuple(SHAPES[name] for name in names if SHAPES[name] is not without)
