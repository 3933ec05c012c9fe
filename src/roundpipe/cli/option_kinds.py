"""What the command knows about one option: the columns of the table in `cli/options`."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any


class Receiver(enum.Enum):
    """Which object gets the value of an option."""

    COMMAND = "the command itself"
    TRAINER = "the config class of --method"
    ROUNDPIPE = "RoundPipeOptions"


class OnResume(enum.Enum):
    """What a resumed run does with a value that differs from that of the run before."""

    WARN = "warns that losses may differ"
    ACCEPT = "uses it: the value does not change the numbers of a run"
    NO_EFFECT = "warns: the optimizer's state has the value of the run before"
    NOT_KEPT = "does not know: train.yaml does not have the option"


@dataclasses.dataclass(frozen=True)
class Bound:
    """A rule for a number. `text` completes the sentence "--lr must "."""

    text: str
    holds: Callable[[float], bool]


FINITE = Bound("be a finite number", math.isfinite)
POSITIVE = (FINITE, Bound("be greater than 0", lambda value: value > 0))
NOT_NEGATIVE = (FINITE, Bound("not be negative", lambda value: value >= 0))
SHARE = (Bound("be at least 0 and less than 1", lambda value: 0 <= value < 1),)
SEED = (Bound("be between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32),)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


BOOL: Any = {"nargs": "?", "const": True, "type": _truth, "metavar": "BOOL"}  # how a truth value is read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """All that the command knows about one option.

    name: of the setting. An option of the trainer's arguments has the name of the field.
    short: how users write it, if not by its name.
    heading: its group in --help. None for fields of the trainer's arguments that have no short option; the parser of
        transformers reads them.
    help: its line in --help, without the default.
    reading: arguments of argparse's add_argument.
    default: the value of an option that is not given; None if another option, the data or the machine decides.
    default_text: the default in words, where the value does not say it.
    receiver: which object gets the value.
    bounds: rules for its number.
    is_needed: whether the command refuses to run without it.
    is_path: whether its values are names of files or folders.
    excludes: an option that cannot be given beside this one.
    needs: an option without which this one has no meaning.
    refused: why the command refuses a value that is not empty or false.
    may_differ: whether machines of one run may have different values.
    on_resume: what a resumed run does with another value.
    elsewhere: names that axolotl, LLaMA-Factory, TRL and Unsloth have for it, and the answer to a user who types one.
    """

    name: str
    short: str = ""
    heading: str | None = None
    help: str = ""
    reading: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    default: Any = None
    default_text: str = ""
    receiver: Receiver = Receiver.TRAINER
    bounds: tuple[Bound, ...] = ()
    is_needed: bool = False
    is_path: bool = False
    excludes: str = ""
    needs: str = ""
    refused: str = ""
    may_differ: bool = False
    on_resume: OnResume = OnResume.WARN
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def written(self, *, full: bool = False) -> str:
        """How users write the option: the short form if there is one, unless `full`."""
        return "--" + (self.name if full else self.short or self.name).replace("_", "-")

    def help_line(self) -> str:
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        default = self.default_text or ("" if shown in (None, False) else shown)
        return f"{self.help} ({default})" if default else self.help
