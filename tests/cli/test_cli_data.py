"""Files to rows to tokens: which tokens have a loss, and which rows are refused, with their line."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from tiny_models import BEGIN, END, EOS, MARKED_TEMPLATE, PLAIN_TEMPLATE, new_tokenizer
from trl.chat_template_utils import qwen2_5_chat_template
from trl.trainer.sft_config import SFTConfig

from roundpipe.cli.data import TrainRows, check_tokens, tokenize
from roundpipe.cli.rows import IGNORED, read_rows
from roundpipe.cli.shapes import RowFormat
from roundpipe.cli.sources import Places
from roundpipe.errors import ConfigError

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok"},
]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def tokens_of(path: Path, tokenizer: Any, assistant_only: bool | None = None, **options: Any) -> TrainRows:
    config = SFTConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **options)
    return tokenize(read_rows(path, "--data", "line"), tokenizer, config, assistant_only=assistant_only)


def pieces(row: dict[str, list[int]], tokenizer: Any) -> list[tuple[str, bool]]:
    """The row as text: (text, whether it has a loss) of each run of equal tokens."""
    found: list[tuple[str, bool]] = []
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, IGNORED)
        text, is_trained = tokenizer.decode([token]), label != IGNORED
        if found and found[-1][1] is is_trained:
            found[-1] = (found[-1][0] + text, is_trained)
        else:
            found.append((text, is_trained))
    return found


def refusal(path: Path, text_rows: str = "line") -> str:
    with pytest.raises(ConfigError) as caught:
        read_rows(path, "--data", text_rows)
    return str(caught.value)


# Which tokens have a loss.


def test_all_tokens_of_text_have_a_loss(tmp_path: Path) -> None:
    tokenizer = new_tokenizer()
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"text": "abc", "note": 1}, {"text": "de"}), tokenizer)
    assert [pieces(row, tokenizer) for row in tokens.dataset] == [[("abc" + EOS, True)], [("de" + EOS, True)]]
    assert tokens.dataset.column_names == ["input_ids", "labels"]


def test_only_the_completion_has_a_loss(tmp_path: Path) -> None:
    tokenizer = new_tokenizer()
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"prompt": "abc ", "completion": "xy"}), tokenizer)
    assert pieces(tokens.dataset[0], tokenizer) == [("abc ", False), ("xy" + EOS, True)]


def test_the_prompt_has_a_loss_if_the_user_asks_for_it(tmp_path: Path) -> None:
    tokenizer = new_tokenizer()
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "abc ", "completion": "xy"})
    tokens = tokens_of(path, tokenizer, completion_only_loss=False)
    assert pieces(tokens.dataset[0], tokenizer) == [("abc xy" + EOS, True)]


def test_a_warning_about_prompts_that_join_their_completions_comes_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's text quotes the end of each prompt, so it has a warning for every row."""
    tokenizer = new_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    pairs = [("k", "p"), ("k", "v"), ("q", "z"), ("w", "b")]
    content["model"]["merges"] = [list(pair) for pair in pairs]
    content["model"]["vocab"] |= {"".join(pair): 1000 + number for number, pair in enumerate(pairs)}
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(content))
    rows = [{"prompt": f"x{left}", "completion": f"{right}y"} for left, right in pairs]
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", *rows), tokenizer)
    assert [record.getMessage().count("not a prefix") for record in caplog.records] == [1]
    assert pieces(tokens.dataset[3], tokenizer) == [("x", False), ("wby" + EOS, True)]


def test_prompt_and_completion_may_be_messages(tmp_path: Path) -> None:
    tokenizer = new_tokenizer(PLAIN_TEMPLATE)
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"prompt": CHAT[:1], "completion": CHAT[1:2]}), tokenizer)
    assert pieces(tokens.dataset[0], tokenizer) == [
        (f"{BEGIN}user:hi{END}{BEGIN}assistant:", False),
        (f"yo{END}", True),
    ]


@pytest.mark.parametrize("template", [MARKED_TEMPLATE, PLAIN_TEMPLATE], ids=["with markers", "without markers"])
def test_only_the_assistants_messages_have_a_loss(tmp_path: Path, template: str) -> None:
    tokenizer = new_tokenizer(template)
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": CHAT}), tokenizer)
    assert pieces(tokens.dataset[0], tokenizer) == [
        (f"{BEGIN}user:hi{END}{BEGIN}assistant:", False),
        (f"yo{END}", True),
        (f"{BEGIN}user:bye{END}{BEGIN}assistant:", False),
        (f"ok{END}", True),
    ]


def test_trl_marks_templates_that_it_knows(tmp_path: Path) -> None:
    tokenizer = new_tokenizer(qwen2_5_chat_template)
    system = {"role": "system", "content": "S"}
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": [system, *CHAT[:2]]}), tokenizer)
    assert pieces(tokens.dataset[0], tokenizer) == [
        (f"{BEGIN}system\nS{END}\n{BEGIN}user\nhi{END}\n{BEGIN}assistant", False),
        (f"\nyo{END}\n", True),
    ]


def test_the_header_of_a_turn_has_no_loss_if_the_template_has_no_generation_prompt(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = new_tokenizer(template)
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": CHAT[:2]}), tokenizer)
    assert pieces(tokens.dataset[0], tokenizer) == [(f"[user] hi{END}[assistant] ", False), (f"yo{END}", True)]


def test_all_tokens_of_messages_have_a_loss_if_the_user_asks_for_it(tmp_path: Path) -> None:
    tokenizer = new_tokenizer(PLAIN_TEMPLATE)
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": CHAT[:2]}), tokenizer, assistant_only=False)
    assert [is_trained for _, is_trained in pieces(tokens.dataset[0], tokenizer)] == [True]


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content|upper }};{% endfor %}"
    with pytest.raises(ConfigError, match=r"d\.jsonl, line 1: the chat template renders the first .* generation"):
        tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": CHAT}), new_tokenizer(template))


def test_a_template_that_changes_the_content_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content|upper }};{% endfor %}"
    with pytest.raises(ConfigError, match="line 1: the chat template changes the content of message 2"):
        tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": CHAT[:2]}), new_tokenizer(template))


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: .*no chat template; give one with --chat-template-path"):
        tokens_of(jsonl(tmp_path / "d.jsonl", {"messages": CHAT}), new_tokenizer(None))


def test_the_row_that_a_template_refuses_is_named(tmp_path: Path) -> None:
    template = MARKED_TEMPLATE + "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    good, bad = {"messages": CHAT}, {"messages": [{"role": "user", "content": "bad"}, *CHAT[1:2]]}
    with pytest.raises(ConfigError, match=r"d\.jsonl, line 4: the row cannot be tokenized: .*no bad words"):
        tokens_of(jsonl(tmp_path / "d.jsonl", good, good, "", bad, good), new_tokenizer(template))


def test_messages_with_tool_calls_keep_their_arguments(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments|tojson }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )

    def call(arguments: dict[str, Any]) -> dict[str, Any]:
        called = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [called]}]}

    tokenizer = new_tokenizer(template)
    path = jsonl(tmp_path / "d.jsonl", call({"a": 1}), call({"b": "x"}), {"messages": CHAT[:2]})
    trained = [pieces(row, tokenizer)[-1][0] for row in tokens_of(path, tokenizer).dataset]
    assert trained == ['{"a": 1}' + END, '{"b": "x"}' + END, "yo" + END]


# Files.


def test_txt_files_have_rows_of_lines_paragraphs_or_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("a\nb\n\nc\n")
    assert read_rows(path, "--data", "line").dataset["text"][:] == ["a", "b", "c"]
    assert read_rows(path, "--data", "paragraph").dataset["text"][:] == ["a\nb", "c\n"]
    assert read_rows(path, "--data", "document").dataset["text"][:] == ["a\nb\n\nc\n"]


def test_lines_of_a_txt_file_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffa\u2028b\x0cc\x85d\r\ne\n".encode())
    rows = read_rows(path, "--data", "line")
    assert rows.dataset["text"][:] == ["a\u2028b\x0cc\x85d", "e"]
    assert rows.places.name(1) == f"{path}, line 2"


def test_a_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl", {"text": "2"})
    jsonl(tmp_path / "a.jsonl", {"text": "0"}, "", {"text": "1"})
    (tmp_path / "readme.md").write_text("not data")
    (tmp_path / "._a.jsonl").write_text("left by the system")
    (tmp_path / "c.jsonl").mkdir()
    rows = read_rows(tmp_path, "--data", "line")
    assert rows.dataset["text"][:] == ["0", "1", "2"]
    assert [rows.places.name(row) for row in range(3)] == [
        f"{tmp_path}/a.jsonl, line 1",
        f"{tmp_path}/a.jsonl, line 3",
        f"{tmp_path}/b.jsonl, line 1",
    ]


def test_a_datasets_folder_is_read_and_stays_as_it_is(tmp_path: Path) -> None:
    Dataset.from_list([{"messages": CHAT, "id": 1}]).save_to_disk(tmp_path / "d")
    files = sorted((tmp_path / "d").iterdir())
    tokenizer = new_tokenizer()
    tokens = tokens_of(tmp_path / "d", tokenizer)
    assert pieces(tokens.dataset[0], tokenizer)[-1] == (f"ok{END}", True)
    assert sorted((tmp_path / "d").iterdir()) == files


def test_a_datasets_folder_may_be_tokenized_already(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}
    Dataset.from_list([row]).save_to_disk(tmp_path / "d")
    rows = read_rows(tmp_path / "d", "--data", "line")
    assert rows.format is RowFormat.TOKENS
    assert tokens_of(tmp_path / "d", new_tokenizer()).dataset[0] == row


def test_the_format_that_a_datasets_folder_was_saved_with_does_not_matter(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}
    Dataset.from_list([row]).with_format("torch").save_to_disk(tmp_path / "d")
    assert tokens_of(tmp_path / "d", new_tokenizer()).dataset[0] == row


def test_rows_of_a_file_may_be_tokenized_already(tmp_path: Path) -> None:
    """Their labels count as they are, whichever tokens they have a loss for."""
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED, 9, 7]}, {"input_ids": [8, 4], "labels": [8, 3]}]
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", *rows), new_tokenizer())
    assert tokens.dataset[:] == {"input_ids": [[5, 6, 7], [8, 4]], "labels": [[IGNORED, 9, 7], [8, 3]]}
    without = tokens_of(jsonl(tmp_path / "e.jsonl", {"input_ids": [5, 6]}), new_tokenizer())
    assert without.dataset[0] == {"input_ids": [5, 6], "labels": [5, 6]}


@pytest.mark.parametrize("kind", ["file", "datasets folder"])
def test_labels_in_some_rows_only_are_refused(tmp_path: Path, kind: str) -> None:
    rows = [{"input_ids": [5, 6], "labels": [IGNORED, 6]}, {"input_ids": [5, 6]}]
    path = tmp_path / "d.jsonl"
    if kind == "file":
        jsonl(path, *rows)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    assert "some rows have `labels`, others have none; give them to all rows or to none" in refusal(path)


def test_masks_of_tokens_are_refused(tmp_path: Path) -> None:
    """TRL would leave tokens of the mask without loss, so that ignoring the key would train other tokens."""
    message = refusal(jsonl(tmp_path / "d.jsonl", {"input_ids": [5, 6], "completion_mask": [0, 1]}))
    assert (
        "`completion_mask` is not read beside `input_ids`; give `labels`, with -100 for tokens without loss" in message
    )


def test_several_sources_are_joined_in_their_order(tmp_path: Path) -> None:
    """Also sources of different formats, each of which decides which of its tokens have a loss."""
    tokenizer = new_tokenizer()
    Dataset.from_list([{"input_ids": [5, 6], "labels": [IGNORED, 6]}]).save_to_disk(tmp_path / "b")
    parts = [
        tokens_of(jsonl(tmp_path / "a.jsonl", {"prompt": "abc ", "completion": "xy"}), tokenizer),
        tokens_of(tmp_path / "b", tokenizer),
        tokens_of(jsonl(tmp_path / "c.jsonl", "", {"text": "de"}, {"text": "f"}), tokenizer),
    ]
    joined = TrainRows.joined(parts)
    assert list(joined.dataset) == [row for part in parts for row in part.dataset]
    assert [joined.places.name(row) for row in range(4)] == [
        f"{tmp_path}/a.jsonl, line 1",
        f"{tmp_path}/b, row 0",
        f"{tmp_path}/c.jsonl, line 2",
        f"{tmp_path}/c.jsonl, line 3",
    ]
    assert joined.digest() != TrainRows.joined(parts[::-1]).digest()


def test_the_checksum_shows_where_rows_begin_and_nothing_of_how_they_are_kept(tmp_path: Path) -> None:
    def digest(*rows: list[int], width: str = "int64") -> str:
        columns = Features({name: List(Value(width)) for name in ("input_ids", "labels")})
        dataset = Dataset.from_dict({"input_ids": rows, "labels": rows}, features=columns)
        return TrainRows(dataset, Places()).digest()

    assert digest([1, 2], [3]) != digest([1], [2, 3])
    assert digest([1, 2], [3]) != digest([1, 2, 3])
    assert digest([1, 2], [3]) == digest([1, 2], [3], width="int32")
    halves = [Dataset.from_dict({"input_ids": rows, "labels": rows}) for rows in ([[1, 2]], [[3]])]
    assert TrainRows(concatenate_datasets(halves), Places()).digest() == digest([1, 2], [3])


def test_tools_of_later_rows_of_a_datasets_folder_count(tmp_path: Path) -> None:
    rows = [{"messages": CHAT[:2], "tools": None}, {"messages": CHAT[:2], "tools": '[{"name": "f"}]'}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    template = "{% if tools %}{{ tools[0].name }};{% endif %}" + MARKED_TEMPLATE
    tokenizer = new_tokenizer(template)
    plain, with_tools = tokens_of(tmp_path / "d", tokenizer).dataset
    assert pieces(with_tools, tokenizer)[0][0] == "f;" + pieces(plain, tokenizer)[0][0]


def test_a_datasets_folder_with_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list([{"text": "a"}])}).save_to_disk(tmp_path / "d")
    assert "several splits; name one of them: train" in refusal(tmp_path / "d")


def test_a_bad_row_of_a_datasets_folder_is_named(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}, {"text": " "}]).save_to_disk(tmp_path / "d")
    assert refusal(tmp_path / "d").endswith("d, row 1: `text` is empty.")


# Rows that are refused.


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": "a"', "not valid JSON: the line ends at column 12 before its JSON does"),
        ('{"text": "a \\"b', "the line ends at column 15 before its JSON does"),
        ('{"text": "a\\u00', "the line ends at column 15 before its JSON does"),
        ('{"text": "a", "b": tr', "the line ends at column 21 before its JSON does"),
        ('{"text" "a"}', "not valid JSON: Expecting ':' delimiter at column 9"),
        ("{", "The file must have one JSON object per line"),
        ('{"text": "\\ud83d"}', "\\ud83d is half of a surrogate pair"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "the JSON cannot be read"),
        ("[" * 100_000, "the JSON cannot be read"),
        ("[1]", "a row must be a JSON object with `text`"),
        ("{}", "`conversations`, `instruction` and `output`, or `input_ids`; it has nothing"),
        ({"prompt": "a"}, "it has 'prompt'"),
        ({"text": "a", "messages": CHAT}, "it has 'text', 'messages'"),
        ({"text": None}, "a row needs"),
        ({"text": 3}, "`text` must be a string, got int"),
        ({"text": ""}, "`text` is empty"),
        ({"prompt": "a", "completion": "b"}, "this row has prompt and completion, the rows before have text"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: Any, reason: str) -> None:
    message = refusal(jsonl(tmp_path / "d.jsonl", {"text": "a"}, "", row))
    assert message.startswith(f"{tmp_path}/d.jsonl, line 3: ")
    assert reason in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": " "}, "`completion` is empty"),
        ({"prompt": ["a"], "completion": "b"}, "`prompt` must be a string, got list"),
        ({"messages": "hi"}, "`messages` must be a list of messages"),
        ({"messages": []}, "with at least one entry"),
        ({"messages": [{"content": "a"}]}, 'message 1 of `messages` must be an object with "role" and "content"'),
        ({"messages": [*CHAT[:1], {"role": "assistant", "content": 1}]}, "the content of message 2 of `messages`"),
        ({"messages": CHAT[:1]}, "`messages` has no message with the role assistant"),
        ({"input_ids": [5, 2**63]}, "`input_ids` has 9223372036854775808, a number of more than 64 bits"),
        ({"input_ids": [5, 6], "labels": [5, -(10**30)]}, "`labels` has -1000000"),
        ({"messages": CHAT, "tools": [{"n": 2**64}]}, "`tools` has 18446744073709551616, a number of more than 64"),
        ({"prompt": CHAT[:1], "completion": CHAT[:1]}, "`completion` has no message with the role assistant"),
    ],
)
def test_a_bad_row_of_other_formats_is_refused(tmp_path: Path, row: Any, reason: str) -> None:
    message = refusal(jsonl(tmp_path / "d.jsonl", row))
    assert message.startswith(f"{tmp_path}/d.jsonl, line 1: ")
    assert reason in message


@pytest.mark.parametrize("seed", range(3))
def test_random_rows_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    """With no other error than ConfigError."""
    rng = random.Random(seed)
    odd = [
        0,
        -100,
        2**63,
        -(2**64),
        10**30,
        True,
        1.5,
        None,
        "",
        "a\0",
        "\ud83d",
        [],
        {},
        [None],
        {"role": 1},
        "x" * 99,
    ]
    names = ("text", "prompt", "completion", "messages", "input_ids", "labels", "tools", "chat_template_kwargs")
    tokenizer = new_tokenizer()
    for _ in range(40):
        rows = []
        for _ in range(rng.randrange(1, 4)):
            row = dict(rng.choice([{"text": "a"}, {"messages": list(CHAT)}, {"input_ids": [5, 6], "labels": [5, 6]}]))
            for _ in range(rng.randrange(3)):
                name = rng.choice(names)
                values = row.get(name)
                if isinstance(values, list) and values and rng.random() < 0.5:
                    row[name] = [*values[1:], rng.choice(odd)]
                else:
                    row[name] = rng.choice(odd)
            line = list(json.dumps(row))
            if rng.random() < 0.2:
                line[rng.randrange(len(line))] = rng.choice('{}[]",:\\9')
            rows.append("".join(line))
        path = jsonl(tmp_path / "d.jsonl", *rows)
        with contextlib.suppress(ConfigError):
            checked(tokens_of(path, tokenizer), 100)


def test_strings_and_messages_are_not_mixed(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": CHAT[:1], "completion": CHAT[1:2]}]
    message = refusal(jsonl(tmp_path / "d.jsonl", *rows))
    assert message == f"{tmp_path}/d.jsonl, line 2: some rows have strings, others lists of messages; use one form."


def test_endings_may_be_written_in_capitals(tmp_path: Path) -> None:
    assert len(read_rows(jsonl(tmp_path / "D.JSONL", {"text": "a"}), "--data", "line").dataset) == 1


def test_files_that_are_no_data_are_refused(tmp_path: Path) -> None:
    assert "there is no file or folder" in refusal(tmp_path / "nowhere.jsonl")
    (tmp_path / "d.xlsx").write_text("a,b")
    assert "must end in .jsonl, .json, " in refusal(tmp_path / "d.xlsx")
    assert "no .jsonl, .json, .ndjson, .parquet, .arrow, .csv, .tsv or .txt file" in refusal(tmp_path)
    assert "contains no rows" in refusal(jsonl(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe4"}\n')
    assert "latin.jsonl, line 2: not UTF-8 text" in refusal(tmp_path / "latin.jsonl")
    assert "one JSON object per line" in refusal(jsonl(tmp_path / "array.jsonl", "[", '{"text": "a"}', "]"))


# Lengths.


def checked(tokens: TrainRows, seq_len: int, **changes: Any) -> Any:
    options = {
        "truncates": False,
        "keeps_end": False,
        "packs": False,
        "vocabulary": 264,
        "most_positions": 256,
    } | changes
    return check_tokens(tokens, "--data", seq_len=seq_len, **options)


def test_rows_are_counted_as_they_are_trained(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 3, "completion": "b" * 4}, {"prompt": "a" * 8, "completion": "b"}]
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", *rows), new_tokenizer())
    counts = checked(tokens, 10)
    assert (counts.rows, counts.tokens, counts.trained_tokens, counts.longest) == (2, 8 + 10, 5 + 2, 10)
    cut = checked(tokens, 6, truncates=True)
    assert (cut.rows, cut.tokens, cut.trained_tokens, cut.truncated, cut.dropped) == (1, 12, 3, 2, 1)
    end = checked(tokens, 6, truncates=True, keeps_end=True)
    assert (end.rows, end.tokens, end.trained_tokens, end.truncated, end.dropped) == (2, 12, 7, 2, 0)
    packed = checked(tokens, 6, packs=True)
    assert (packed.rows, packed.tokens, packed.trained_tokens, packed.longest) == (3, 18, 7, 6)


def test_a_row_that_is_too_long_is_refused_with_its_line_and_their_number(tmp_path: Path) -> None:
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", *({"text": "a" * size} for size in (2, 9, 3, 7))), new_tokenizer())
    with pytest.raises(ConfigError) as caught:
        checked(tokens, 5)
    message = str(caught.value)
    assert "d.jsonl, line 2: the row has 10 tokens, more than --seq-len 5; 2 of 4 rows are too long" in message
    assert "--truncate" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocabulary": 50}, "line 1: token .* is outside of the model's vocabulary of 50"),
        ({"most_positions": 3}, "sequences of 6 tokens do not fit: the model has 3 positions"),
    ],
)
def test_tokens_that_the_model_cannot_take_are_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    tokens = tokens_of(jsonl(tmp_path / "d.jsonl", {"text": "aaaaa"}), new_tokenizer())
    with pytest.raises(ConfigError, match=reason):
        checked(tokens, 10, **changes)


def test_labels_that_are_null_are_none(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"input_ids": [5, 6], "labels": None})
    assert tokens_of(path, new_tokenizer()).dataset[0]["labels"] == [5, 6]


def test_a_row_without_any_loss_is_refused(tmp_path: Path) -> None:
    Dataset.from_list([{"input_ids": [5, 6], "labels": [IGNORED, IGNORED]}]).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match="row 0: no token of this row has a loss"):
        checked(tokens_of(tmp_path / "d", new_tokenizer()), 10)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [5, -6]}, "row 0: token -6 is outside of the model's vocabulary of 264"),
        ({"input_ids": [5, 6], "labels": [5, 264]}, r"row 0: `labels` must be -100 or tokens .* got 264"),
        ({"input_ids": [5] * 4, "labels": [5, IGNORED, 7, -1]}, r"row 0: `labels` must be -100 .* got -1 to 7"),
        ({"input_ids": [5]}, "row 0: no token of this row has a loss"),
        ({"input_ids": ["a"]}, "row 0: `input_ids` must be a list of whole numbers"),
        ({"input_ids": [5], "labels": [0.5]}, "row 0: `labels` must be a list of whole numbers"),
    ],
)
def test_wrong_tokens_of_a_datasets_folder_are_refused(tmp_path: Path, row: Any, reason: str) -> None:
    Dataset.from_list([row]).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match=reason):
        checked(tokens_of(tmp_path / "d", new_tokenizer()), 10)
