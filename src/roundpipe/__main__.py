"""The commands `roundpipe` and `python -m roundpipe`.

Turns errors into exit codes: 0 done, 2 a mistake of the user, 1 other failures, 128 + n ended by signal n. Knows no
options.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Mapping, Sequence

from roundpipe.cli import chat, doctor, estimate, merge, show_data, view
from roundpipe.cli.arguments import parse
from roundpipe.cli.launch import is_first
from roundpipe.cli.train import RunFailure, how_to_resume, run
from roundpipe.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    HostMemoryError,
    MachineError,
    NonFiniteError,
    StallError,
)
from roundpipe.version import __version__

_USAGE = """usage: roundpipe COMMAND [options]

commands:
  train       fine-tune a language model; see roundpipe train --help
  data        show rows as the model sees them, and their lengths; see roundpipe data --help
  view        runs in a browser, while they run and afterwards, side by side; see roundpipe view --help
  chat        chat with a model or an adapter; see roundpipe chat --help
  merge       merge a LoRA adapter into its model; see roundpipe merge --help
  estimate    memory, plan and time of a training step, without weights and machine; see roundpipe estimate --help
  doctor      examine this machine: what works, what will be slow, what to do; --json for programs

options:
  --version   print the version
  --help      print this text
"""
_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "data": show_data.run,
    "view": view.run,
    "chat": chat.run,
    "merge": merge.run,
    "estimate": estimate.run,
    "doctor": doctor.run,
}
_MISTAKES = (ConfigError, DeviceError, HostMemoryError, CheckpointError)
_EXTRAS = ("transformers", "trl", "datasets", "accelerate", "peft", "safetensors", "rich", "yaml", "jinja2")
_DONE, _FAILED, _MISTAKE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Unexpected exceptions leave with their traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return _DONE if words else _MISTAKE
    if words[0] == "--version":
        sys.stdout.write(f"roundpipe {__version__}\n")
        return _DONE
    if words[0] != "train" and words[0] not in _COMMANDS:
        names = ", ".join(["train", *_COMMANDS])
        return _complain(f"there is no command {words[0]!r}; the commands are: {names}.", _MISTAKE)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING if is_first() else logging.ERROR)
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler, which writes each line
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without some sign shows a question mark
    settings = None
    try:
        if words[0] in _COMMANDS:
            return _COMMANDS[words[0]](words[1:])
        settings = parse(words[1:])
        return run(settings)
    except _MISTAKES as error:
        return _complain(_with_notes(error), _MISTAKE)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRAS:
            raise
        extra = "transformers" if words[0] == "estimate" else "train"
        return _complain(f"{error.name} is not installed; run: pip install 'roundpipe[{extra}]'", _MISTAKE)
    except (NonFiniteError, StallError, RunFailure, MachineError) as error:
        hint = "" if settings is None else f"\n{how_to_resume(settings)}"
        return _complain(f"{_with_notes(error)}{hint}", _FAILED)
    except KeyboardInterrupt:
        hint = "" if settings is None else f"; {how_to_resume(settings)}"
        return _complain(f"stopped at once by Ctrl-C{hint}", _INTERRUPTED)
    except SystemExit as exit_of_help:
        return exit_of_help.code if isinstance(exit_of_help.code, int) else _DONE
    except Exception as error:
        if settings is not None:
            error.add_note(how_to_resume(settings))
        raise


def _with_notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"roundpipe: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
