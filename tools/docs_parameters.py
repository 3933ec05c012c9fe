"""Extension of griffe for the documentation site: parameters in docstrings become lists.

Docstrings of the library describe parameters in lines `name: text`, with continuation lines indented by four. Markdown
would join these lines into one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)", re.MULTILINE)


class ParametersAsLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Return a docstring with its parameters as items of a Markdown list."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(PARAMETER.sub(r"- `\1`: ", paragraph) for paragraph in paragraphs)
