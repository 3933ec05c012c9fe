"""Rewards of GRPO as Python functions from files: `rewards.py:accuracy`.

Knows files, modules and functions, and the names and numbers that go in and out of a reward; TRL calls it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from roundpipe.errors import ConfigError

# What every call of a reward has beside the other keys of the rows, and what some versions of TRL add.
_ALWAYS = ("prompts", "completions", "completion_ids")
_SOMETIMES = ("trainer_state", "log_extra", "log_metric", "environments")


class Reward:
    """A function of the user that rewards answers. What it does wrong is a ConfigError that names its file and line."""

    def __init__(self, function: Callable[..., Any], path: Path, name: str) -> None:
        self.__name__ = name  # TRL names columns of the log so
        self._function, self._path, self._option = function, path, f"--reward {path.name}:{name}"

    def check_keys(self, keys: Sequence[str]) -> None:
        """Refuse a function that cannot be called with the keys of the rows."""
        parameters = inspect.signature(self._function).parameters.values()
        own = [key for key in keys if key != "prompt"]
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        known = {*_ALWAYS, *_SOMETIMES, *own}
        missing = [each.name for each in named if each.default is each.empty and each.name not in known]
        if missing:
            raise ConfigError(
                f"{self._option} needs {', '.join(missing)}, and rows have no such key; their keys are "
                f"{', '.join(keys)}. A reward gets {', '.join(_ALWAYS)} and the other keys of the rows."
            )
        left = [key for key in (*_ALWAYS, *own) if key not in {each.name for each in named}]
        if left and not any(each.kind is each.VAR_KEYWORD for each in parameters):
            raise ConfigError(f"{self._option} gets {', '.join(left)}, too; end its parameters with **columns.")

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> Any:
        with self._mistakes():
            return self._checked(self._function(completions=completions, **columns), len(completions))

    def _checked(self, found: Any, number: int) -> list[float | None]:
        rewards = [None if each is None else float(each) for each in found]
        if len(rewards) != number:
            raise ConfigError(
                f"{self._option} returned {len(rewards)} rewards for {number} answers; return one for each."
            )
        return rewards

    @contextlib.contextmanager
    def _mistakes(self) -> Iterator[None]:
        """Exceptions inside the block become a ConfigError."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            lines = [
                each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(self._path)
            ]
            place = f" in line {lines[-1]}" if lines else ""
            raise ConfigError(
                f"{self._option} did not return a list of numbers: {type(error).__name__}{place}: {error}"
            ) from error


class AsyncReward(Reward):
    """A reward that TRL awaits, together with others of this kind."""

    async def __call__(self, *, completions: Sequence[Any], **columns: Any) -> Any:
        with self._mistakes():
            return self._checked(await self._function(completions=completions, **columns), len(completions))


def load_rewards(given: Sequence[str]) -> list[Reward]:
    """The functions that `FILE.py:NAME` texts name, in this order; a file is run once. Raises ConfigError.

    A file may import others of its folder, as a script does.
    """
    modules: dict[Path, ModuleType] = {}
    rewards: dict[str, Reward] = {}
    for text in given:
        file, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier() or not file.endswith(".py"):
            raise ConfigError(f"--reward {text!r} must be FILE.py:FUNCTION, such as rewards.py:accuracy.")
        if name in rewards:
            raise ConfigError(
                f"--reward has two functions with the name {name}; their columns in the log have one name."
            )
        path = Path(file).absolute()
        if path not in modules:
            modules[path] = _run(path)
        function = _function(modules[path], path, name)
        kind = AsyncReward if inspect.iscoroutinefunction(function) else Reward
        rewards[name] = kind(function, path, name)
    return list(rewards.values())


def with_whole_path(given: str) -> str:
    """The name of a reward with the absolute path of its file."""
    file, _, name = given.rpartition(":")
    return f"{Path(file).absolute()}:{name}"


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"--reward: there is no file {path}.")
    name = f"roundpipe_rewards_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules of classes up by name
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"--reward: {path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, type):
        own = sorted(
            other
            for other, value in vars(module).items()
            if callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module.__name__
        )
        raise ConfigError(
            f"--reward: {path} has no function {name}; its functions are {', '.join(own)}."
            if own
            else f"--reward: {path} has no function {name}, and no other."
        )
    result: Callable[..., Any] = found
    return result
