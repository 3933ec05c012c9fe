"""Reward functions from files: what loads, and what is refused in which words."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest

from roundpipe.cli.rewards import Reward, load_rewards
from roundpipe.errors import ConfigError

REWARDS = """
from dataclasses import dataclass
from helper_of_rewards import BONUS

print("run")

@dataclass
class Answer:
    text: str

def accuracy(completions, answer, **_):
    return [BONUS if found == expected else 0.0 for found, expected in zip(completions, answer)]

def length(completions, **_):
    return [-float(len(Answer(text).text)) for text in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_rewards.py").write_text("BONUS = 2.0\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path / "rewards.py"


def test_functions_of_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.path)
    length, accuracy = load_rewards([f"{file}:length", f"{file}:accuracy"])
    assert capsys.readouterr().out == "run\n", "the file runs once"
    assert (length.__name__, accuracy.__name__) == ("length", "accuracy")  # TRL names columns of the log so
    assert length(completions=["ab", ""]) == [-2.0, 0.0]
    assert accuracy(completions=["4", "5"], answer=["4", "4"]) == [2.0, 0.0]
    assert sys.path == before


def test_path_relative_to_the_working_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    (reward,) = load_rewards(["rewards.py:length"])
    assert reward(completions=["abc"]) == [-3.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rewards.py", "'rewards.py' must be FILE.py:FUNCTION, such as rewards.py:accuracy"),
        ("rewards:accuracy", "'rewards:accuracy' must be FILE.py:FUNCTION"),
        ("rewards.py:", "'rewards.py:' must be FILE.py:FUNCTION"),
        ("none.py:accuracy", "there is no file .*none.py"),
        ("rewards.py:acuracy", "rewards.py has no function acuracy; its functions are accuracy, length."),
        ("rewards.py:Answer", "rewards.py has no function Answer; its functions are accuracy, length."),
        ("helper_of_rewards.py:BONUS", "has no function BONUS, and no other."),
        ("broken.py:accuracy", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_reward_is_refused(given: str, message: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    Path("broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        load_rewards([given])


def test_two_functions_of_one_name_are_refused(file: Path) -> None:
    other = file.with_name("other.py")
    other.write_text("def length(completions, **_):\n    return [0.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=re.escape("two functions with the name length")):
        load_rewards([f"{file}:length", f"{other}:length"])


BAD = """
def needs_more(completions, solution):
    return [0.0 for _ in completions]

def takes_no_more(completions, answer):
    return [0.0 for _ in completions]

def short(completions, **columns):
    return [0.0]

def words(completions, **columns):
    return ["good" for _ in completions]

def nothing(completions, **columns):
    pass

def divides(completions, **columns):
    return [1 / len(text) for text in completions]

async def divides_later(completions, **columns):
    return [1 / len(text) for text in completions]
"""


def reward_two(reward: Reward) -> None:
    reward.check_keys(["prompt", "answer"])
    found = reward(prompts=["a", "b"], completions=["", "x"], completion_ids=[[], [1]], answer=["1", "2"])
    if inspect.iscoroutine(found):
        asyncio.run(found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_more", "bad.py:needs_more needs solution, and rows have no such key; their keys are prompt, answer."),
        ("takes_no_more", "bad.py:takes_no_more gets prompts, completion_ids, too; end its parameters with **columns."),
        ("short", "bad.py:short returned 1 rewards for 2 answers"),
        (
            "words",
            "bad.py:words did not return a list of numbers: ValueError: could not convert string to float: 'good'",
        ),
        ("nothing", "bad.py:nothing did not return a list of numbers: TypeError: 'NoneType' object is not iterable"),
        ("divides", "bad.py:divides did not return a list of numbers: ZeroDivisionError in line 18: division by zero"),
        ("divides_later", "ZeroDivisionError in line 21: division by zero"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_line(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    (reward,) = load_rewards([f"{tmp_path}/bad.py:{name}"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        reward_two(reward)
