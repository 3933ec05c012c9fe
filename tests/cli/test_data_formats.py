"""Data as people have it: every kind of file and form of rows trains as TRL does on the same rows in TRL's columns."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import Dataset
from tiny_models import BEGIN, END, new_tokenizer, save_model
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.cli.data import tokenize
from roundpipe.cli.rows import IGNORED, read_rows
from roundpipe.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content or '' }}{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endif %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
NUM_ROWS = 7


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turn(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


def call_of(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}


def alpaca(n: int) -> dict[str, Any]:
    return {"instruction": f"add {n}", "input": f"to {n}" if n % 2 else "", "output": str(2 * n) * (n % 3 + 1)}


def as_alpaca_chat(n: int) -> dict[str, Any]:
    asked = f"add {n}\n\nto {n}" if n % 2 else f"add {n}"
    return {"messages": [say("user", asked), say("assistant", str(2 * n) * (n % 3 + 1))]}


def as_alpaca_text(n: int) -> dict[str, Any]:
    paired = ", paired with an input that provides further context" if n % 2 else ""
    return {
        "prompt": f"Below is an instruction that describes a task{paired}. Write a response that appropriately "
        f"completes the request.\n\n### Instruction:\nadd {n}\n\n"
        + (f"### Input:\nto {n}\n\n" if n % 2 else "")
        + "### Response:\n",
        "completion": str(2 * n) * (n % 3 + 1),
    }


def sharegpt(n: int) -> dict[str, Any]:
    called = json.dumps({"name": "add", "arguments": {"a": n}})
    turns = [turn("human", f"add {n}"), turn("function_call", called), turn("observation", "x" * (n + 1))]
    return {"conversations": [*turns, turn("gpt", f"is {n}")], "system": "S" if n % 2 else None, "id": n}


def as_sharegpt(n: int) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": n}}}
    spoken = [say("user", f"add {n}"), say("assistant", None, tool_calls=[called]), say("tool", "x" * (n + 1))]
    return {"messages": [*([say("system", "S")] if n % 2 else []), *spoken, say("assistant", f"is {n}")]}


def openai(n: int) -> dict[str, Any]:
    text = [{"type": "text", "text": "add "}, {"type": "text", "text": str(n)}]
    call = call_of(json.dumps({"a": n}))
    return {"messages": [say("user", text), say("assistant", None, tool_calls=[call]), say("tool", "7")]}


def as_openai(n: int) -> dict[str, Any]:
    call = call_of({"a": n})
    return {"messages": [say("user", f"add {n}"), say("assistant", None, tool_calls=[call]), say("tool", "7")]}


def pair(n: int) -> dict[str, Any]:
    return {"prompt": f'say "{n}",\ntwice ', "completion": f"{n} {n}" * (n + 1)}


def text(n: int) -> dict[str, Any]:
    return {"text": f"[{n}] " * (n + 1)}


def tokens(n: int) -> dict[str, Any]:
    ids = list(range(10, 15 + n))
    return {"input_ids": ids, "labels": [IGNORED, IGNORED, *ids[2:]]}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":  # several lines for a row
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".arrow":
        Dataset.from_list(rows).save_to_disk(path.parent / "folder")
        next((path.parent / "folder").glob("*.arrow")).rename(path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            table = csv.DictWriter(stream, rows[0].keys())
            table.writeheader()
            table.writerows({key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in rows)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    return path


CASES = [
    ("a.json", alpaca, as_alpaca_chat, "Alpaca's columns, as messages", []),
    ("a.parquet", alpaca, as_alpaca_text, "Alpaca's columns, in Alpaca's own prompt", ["--format", "alpaca-text"]),
    ("s.parquet", sharegpt, as_sharegpt, "ShareGPT conversations", []),
    ("o.jsonl", openai, as_openai, "messages", []),
    ("p.csv", pair, pair, "prompt and completion", []),
    ("t.arrow", text, text, "text", []),
    ("tokens.csv", tokens, tokens, "input_ids", []),
    ("folder", tokens, tokens, "input_ids", []),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("formats") / "model", chat_template=TEMPLATE, max_position_embeddings=512)


@pytest.mark.parametrize(
    ("name", "given", "wanted", "title", "more"), CASES, ids=lambda each: each if isinstance(each, str) else ""
)
@pytest.mark.filterwarnings("ignore")
def test_data_trains_as_in_trl(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    given: Any,
    wanted: Any,
    title: str,
    more: list[str],
) -> None:
    """Losses of all steps, and labels of all rows, are those of plain SFTTrainer."""
    path, out = write(tmp_path / name, [given(n) for n in range(NUM_ROWS)]), tmp_path / "out"
    command = ["train", "--model", str(model), "--data", str(path), "--out", str(out), "--devices", "cpu*2"]
    usual = ["--batch", "4", "--lr", "1e-2", "--seq-len", "512", "--steps", "3", "--no-view"]
    assert main([*command, *usual, *more]) == 0
    assert f"--data {path}: {NUM_ROWS} rows of {title}\n" in capsys.readouterr().out

    rows = [wanted(n) for n in range(NUM_ROWS)]
    config = SFTConfig(
        output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, report_to="none", max_steps=3, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=4, logging_steps=1, seed=42,
        max_length=512, save_strategy="no", gradient_checkpointing=False, assistant_only_loss="messages" in rows[0],
        disable_tqdm=True,
    )  # fmt: skip
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    plain = SFTTrainer(str(model), config, train_dataset=dataset, processing_class=new_tokenizer(TEMPLATE))
    plain.train()
    expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    newest = latest(out)
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    assert [entry["loss"] for entry in history if "loss" in entry] == pytest.approx(expected, rel=1e-5)

    form = more[1] if more else None
    ours = tokenize(read_rows(path, "--data", "line", form=form), new_tokenizer(TEMPLATE), config, assistant_only=None)
    labels = [plain.data_collator([row])["labels"][0].tolist() for row in plain.train_dataset]
    assert [row["labels"] for row in ours.dataset] == labels
    assert any(IGNORED in row for row in labels) is (given is not text)


def reader_of(path: Path, **options: Any) -> Any:
    return read_rows(path, "--data", "line", **options)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        reader_of(path, **options)
    return str(caught.value)


def test_a_row_of_an_array_on_one_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('[{"text": "a"}, {"text": "b"}, {"text": 3}]\n')
    assert refusal(path).startswith(f"{path}, entry 3: `text` must be a string")
    path.write_text('[{"text": "a"}, {"text": }]')
    assert refusal(path).startswith(f"{path}, entry 2: not valid JSON: Expecting value at line 1, column 26")


def test_rows_of_another_method_are_refused_with_the_methods(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert "it has 'prompt', 'chosen', 'rejected': rows for --method dpo, kto, orpo, reward" in refusal(path)


def test_a_row_of_an_array_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('[\n  {"text": "a"},\n  {\n    "text": "b"},\n  {"text": 3}]')
    assert refusal(path).startswith(f"{path}, line 5: `text` must be a string")
    path.write_text('[\n  {"text": "a"},\n  {"text": }\n]')
    assert refusal(path) == f"{path}, line 3: not valid JSON: Expecting value at line 3, column 12."
    path.write_text('[{"text": "a"}\n\n{"text": "b"}]')
    assert refusal(path) == f"{path}, line 3: not valid JSON: a comma or ] is missing before '{{'."
    path.write_text('[{"text": "a"}')
    assert refusal(path) == f"{path}, line 1: not valid JSON: a comma or ] is missing before the end of the file."
    path.write_text('[{"text": "a"}] []')
    assert refusal(path) == f"{path}: not valid JSON: there is text after the ] that ends the array."
    path.write_text('[{"text": "\\ud83d"}]')
    assert "entry 1: \\ud83d is half of a surrogate pair" in refusal(path)
    path.write_text(" [ ] ")
    assert refusal(path) == f"--data: {path} contains no rows."
    path.write_text('{"text": "a"}\n{"text": "b"}\n')  # one object per line, as many tools name .json
    assert reader_of(path).dataset["text"][:] == ["a", "b"]


def test_a_row_of_a_table_of_text_is_named_by_the_line_in_which_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('text,n\n"a\nb",1\n\n,2\n')
    assert refusal(path) == f"{path}, line 5: `text` is empty."
    path.write_text("text,n\na,1\nb\n")
    assert refusal(path).startswith(f"{path}, line 3: the row has 1 cells, the header 2; put cells with ','")
    path.write_text('text\n"a"b\n')
    assert refusal(path).startswith(f"{path}, line 2: the cells cannot be read:")
    path.write_text("text,text\na,b\n")
    assert refusal(path) == f"{path}, line 1: two columns have the same name: text, text."
    path.write_text("text\n" + "long " * 50_000 + "\n")
    assert len(reader_of(path).dataset[0]["text"]) == 250_000
    tabs = tmp_path / "d.tsv"
    tabs.write_text("prompt\tcompletion\na, b\tc\n")
    assert reader_of(tabs).dataset[0] == {"prompt": "a, b", "completion": "c"}


TWO = [pair(1), pair(2)]
LINES = "".join(json.dumps(row) + "\n" for row in TWO)
CELLS = 'prompt,completion\n"say ""1"",\ntwice ",1 11 1\n"say ""2"",\ntwice ",2 22 22 2\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("crlf.jsonl", LINES.replace("\n", "\r\n").encode()),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(TWO, indent=1).replace("\n", "\r\n").encode()),
        ("wrapped.json", json.dumps({"data": TWO}, indent=2).encode()),
        ("on one line.json", json.dumps({"train": TWO}).encode()),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("a.JSON.GZ", gzip.compress(json.dumps(TWO).encode())),
        ("a.csv.gz", gzip.compress(CELLS.encode())),
        ("a.jsonl.zst", pyarrow.compress(LINES.encode(), "zstd", asbytes=True)),
        ("numbers.jsonl", "".join(json.dumps({**row, "id": 10**30, "x": None}) + "\n" for row in TWO).encode()),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_odd_files_have_the_rows_that_are_in_them(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(reader_of(tmp_path / name).dataset) == TWO


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'{"data": [{"text": "a"}], "version": 1}', ": there is more beside the array of rows"),
        ("a.json", b'{"data": [{"text": "a"}]', ": not valid JSON: a } is missing after the ]"),
        ("a.jsonl.gz", gzip.compress(LINES.encode() * 999)[:-60], ": Compressed file ended before"),
        ("a.jsonl.gz", LINES.encode(), ": Not a gzipped file"),
        ("a.jsonl.zst", LINES.encode(), ": ZSTD decompress failed"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), " must end in .jsonl"),
        ("a.jsonl", LINES.encode("utf-16"), ", line 1: not UTF-8 text"),
        (
            "a.jsonl",
            json.dumps({"messages": [say("assistant", None, tool_calls=[call_of({"a": 2**64})])]}).encode(),
            ", line 1: `messages` has 18446744073709551616, a number of more than 64 bits",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_odd_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name}{reason}" in refusal(tmp_path / name)


def test_options_of_the_template_may_be_in_some_rows_only(tmp_path: Path) -> None:
    chat = {"messages": [say("user", "a"), say("assistant", "b")]}
    path = write(tmp_path / "a.jsonl", [{**chat, "chat_template_kwargs": {"x": 1}}, chat])
    tokenizer, config = new_tokenizer(TEMPLATE), SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    first, second = tokenize(reader_of(path), tokenizer, config, assistant_only=None).dataset
    assert first == second


def test_files_of_a_folder_may_be_of_several_kinds(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"text": "0", "n": 1}, {"text": "1", "n": 2}])
    write(tmp_path / "b.jsonl", [{"text": "2"}])
    write(tmp_path / "c.csv", [{"text": "3"}])
    rows = reader_of(tmp_path)
    assert rows.dataset["text"][:] == ["0", "1", "2", "3"]
    assert [rows.places.name(row) for row in (1, 3)] == [f"{tmp_path}/a.parquet, row 1", f"{tmp_path}/c.csv, line 2"]


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    for ending in ("parquet", "arrow"):
        (tmp_path / f"d.{ending}").write_text("no table")
        assert f"--data: {tmp_path}/d.{ending} cannot be read: " in refusal(tmp_path / f"d.{ending}")


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    for value in ("old", "new"):
        write(path, [{"text": value}])
        assert reader_of(path).dataset["text"][:] == [value]


def test_a_dataset_of_the_hub_is_loaded_by_name_config_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((*args, *kwargs.values()))
        if args[0] == "no/where":
            raise ValueError("no such\ndataset")
        return Dataset.from_list([{"text": "a"}, {"text": " "}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("me/set", "me/set:test", "me/set:en-US:train[:10%]", "no/where"):
        message = refusal(Path(name))
        if name == "no/where":
            assert message.endswith("owner/name:config:split) cannot be loaded: no such dataset")
        else:
            assert message == f"{name}, row 1: `text` is empty."
    assert asked == [
        ("me/set", None, "train"),
        ("me/set", None, "test"),
        ("me/set", "en-US", "train[:10%]"),
        ("no/where", None, "train"),
    ]


def test_the_form_can_be_forced(tmp_path: Path) -> None:
    """Sets on the hub have Alpaca's columns and the rendered text beside them."""
    path = write(tmp_path / "d.jsonl", [{**alpaca(1), "text": "rendered"}])
    message = refusal(path)
    assert "line 1: it has 'instruction', 'input', 'output', 'text', which is more than one form" in message
    assert message.endswith("give --format text or --format alpaca.")
    assert reader_of(path, form="text").dataset[0] == {"text": "rendered"}
    assert reader_of(path, form="alpaca").dataset[0] == as_alpaca_chat(1)
    assert "line 1: a row needs `conversations`; it has 'instruction'" in refusal(path, form="sharegpt")


def test_alpaca_rows_are_text_for_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [alpaca(1), alpaca(2)])
    assert list(reader_of(path, chats=False).dataset) == [as_alpaca_text(1), as_alpaca_text(2)]
    bad = write(tmp_path / "e.jsonl", [{**alpaca(1), "system": "S"}])
    assert "line 1: `system` needs a tokenizer with a chat template" in refusal(bad, chats=False)


def test_earlier_turns_of_alpaca_rows_are_trained_too(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{**alpaca(1), "system": "S", "history": [["hi", "yo"]]}])
    rows = reader_of(path)
    config = SFTConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none")
    tokenizer = new_tokenizer(TEMPLATE)
    (row,) = tokenize(rows, tokenizer, config, assistant_only=None).dataset
    assert tokenizer.decode(row["input_ids"]).startswith(f"{BEGIN}system:S{END}{BEGIN}user:hi{END}{BEGIN}assistant:yo")
    assert tokenizer.decode([each for each in row["labels"] if each != IGNORED]) == f"yo{END}2{'2'}{END}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**alpaca(1), "output": " "}, "`output` is empty"),
        ({**alpaca(1), "instruction": 5}, "`instruction` must be a string, got int"),
        ({**alpaca(1), "history": ["a"]}, "`history` must be a list of pairs"),
        ({"conversations": "hi"}, "`conversations` must be a list of messages"),
        ({"conversations": "[hi]"}, "`conversations` is not valid JSON"),
        ({"conversations": [turn("robot", "a")]}, "message 1 of `conversations` is from 'robot'; use one of human"),
        ({"conversations": [turn("human", "a")]}, "`messages` has no message with the role assistant"),
        ({"conversations": [turn("human", 5)]}, "the value of message 1 of `conversations` must be a string, got int"),  # type: ignore[arg-type]
        ({"conversations": [turn("function_call", "f(1)")]}, "the value of message 1 of `conversations` must be JSON"),
        ({"conversations": [turn("function_call", "[1]")]}, "message 1 of `conversations` must be a call such as"),
        ({"messages": [say("user", [{"type": "image_url"}])]}, "has a part of type image_url; only text"),
        ({"messages": [say("assistant", "a", weight=0)]}, "message 1 of `messages` has weight 0"),
        ({"messages": [say("assistant", "", tool_calls=[call_of("{")])]}, "the arguments of a tool call of message 1"),
    ],
)
def test_a_row_that_does_not_fit_its_form_is_named(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "d.jsonl", [row])
    message = refusal(path)
    assert message.startswith(f"{path}, line 1: ")
    assert reason in message
