"""Where rows have images, and where these stand in messages. Knows keys of rows and files, never models."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe.cli.shapes import MisfitError, Row

_MARK = "<image>"  # where an image stands in the text of LLaVA's data
_CONVERSATIONS = ("messages", "conversations", "prompt", "completion")  # keys that may have messages


def with_images(row: Row, folder: Path) -> Row:
    """A row whose images are in `images`, and whose messages say by parts of type image where they stand.

    Images are in `image`, in `images` or in the parts of messages: names of files, beside the data or whole, data URLs,
    or bytes. A row without images stays as it is. Raises MisfitError.
    """
    conversations = {key: row[key] for key in _CONVERSATIONS if isinstance(row.get(key), list)}
    is_of_chat = any(row.get(key) is not None for key in (*_CONVERSATIONS, "instruction", "chosen"))
    given = row.get("images") if is_of_chat else None
    if given is None and is_of_chat and row.get("image") is not None:
        given = [row["image"]]
    found = list(given) if isinstance(given, list) else [] if given is None else [given]
    if not found and not any(_parts_of(message) for messages in conversations.values() for message in messages):
        return row
    changes = {key: [_placed(message, found) for message in messages] for key, messages in conversations.items()}
    if not found:
        return row
    if not any(_has_image(message) for messages in changes.values() for message in messages):
        changes = {}  # TRL puts them before the text of the first message
    return {**row, **changes, "images": [_image(each, folder) for each in found]}


def _placed(message: Any, found: list[Any]) -> Any:
    """A message whose content is a list of parts; images in it are added to `found`."""
    key = "value" if isinstance(message, Mapping) and "from" in message else "content"
    content = message.get(key) if isinstance(message, Mapping) else None
    if isinstance(content, str):
        pieces = content.split(_MARK)
        parts = [{"type": "text", "text": piece.strip("\n") if len(pieces) > 1 else piece} for piece in pieces]
        placed = [part for each in parts for part in ({"type": "image"}, each)][1:]
        content = [part for part in placed if part.get("text") != ""] or parts
    elif isinstance(content, list):
        content = [_part(part, found) for part in content]
    else:
        return message
    return {**message, key: content}


def _part(part: Any, found: list[Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return part
    for key in ("image", "image_url", "url", "path"):
        value = part.get(key)
        if value is not None:
            found.append(value.get("url") if key == "image_url" and isinstance(value, Mapping) else value)
            break
    return {"type": "image"}


def _parts_of(message: Any) -> list[Any]:
    """The parts of a message; none if its content is text."""
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _has_image(message: Any) -> bool:
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in _parts_of(message))


def _image(given: Any, folder: Path) -> dict[str, Any]:
    """An image as the datasets library keeps it: bytes, or the name of a file."""
    if isinstance(given, Mapping):
        if given.get("bytes") is not None:
            return {"bytes": given["bytes"], "path": None}
        given = given.get("path")
    if not isinstance(given, str):
        raise MisfitError(f"an image must be the name of a file, got {type(given).__name__}")
    if given.startswith("data:"):
        try:
            return {"bytes": base64.b64decode(given.partition("base64,")[2], validate=True), "path": None}
        except binascii.Error as error:
            raise MisfitError(f"an image is a data URL without base64: {error}") from error
    if "://" in given and not given.startswith("file://"):
        raise MisfitError(f"the image {given} is on the network; download it and give the name of the file")
    name = given.removeprefix("file://")
    places = [folder / name, Path(name)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise MisfitError(f"there is no image {places[0]}")
    return {"bytes": None, "path": str(found.absolute())}
