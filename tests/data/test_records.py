"""Reading rows: the kinds that exist, and one clear message with file and line for every wrong one."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fathom.config.schema import DataConfig
from fathom.data.records import Conversation, Dropped, fill, read_conversations
from fathom.errors import ConfigError, DataError, FathomError


def read(source: object, limit: int | None = None, **settings: object) -> list[Conversation | Dropped]:
    return list(read_conversations(str(source), DataConfig(train="unused", **settings), limit))  # pyright: ignore


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_question_and_answer_rows_go_through_the_templates(tmp_path: Path) -> None:
    row = {"question": " 1+1? ", "solution": "1+1=<<1+1=2>>2", "answer": 2}
    (made,) = read(
        jsonl(tmp_path, row),
        answer_template="{solution}\nSo \\boxed{{answer}} {}.",
        strip_pattern="<<.*?>>",
        system_prompt="Think.",
    )
    assert isinstance(made, Conversation)
    assert made.where.endswith("rows.jsonl:1")
    assert made.messages == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "1+1=2\nSo \\boxed{2} {}."},
    ]


def test_a_value_is_never_read_as_a_template() -> None:
    assert fill("{a}{b}", {"a": "{b}{0}%s", "b": 1.5}, "x:1", "question_template") == "{b}{0}%s1.5"


def test_messages_with_tools_and_a_system_prompt(tmp_path: Path) -> None:
    tool = {"name": "add", "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": tool}
    own = [{"role": "system", "content": "own"}, *MESSAGES]
    first, second = read(
        jsonl(tmp_path, {"messages": MESSAGES, "tools": [tool]}, {"messages": own, "tools": [wrapped]}),
        system_prompt="given",
    )
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert first.tools == second.tools == [wrapped]
    assert [first.messages[0]["content"], second.messages[0]["content"]] == ["given", "own"]


def test_rows_without_an_assistant_turn_are_dropped_by_reason(tmp_path: Path) -> None:
    made = read(jsonl(tmp_path, {"messages": MESSAGES[:1]}, {"messages": []}, {"messages": MESSAGES}))
    assert [type(row) for row in made] == [Dropped, Dropped, Conversation]
    assert made[0] == Dropped("no_assistant_turn", made[0].where)


def test_blank_lines_a_byte_order_mark_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"question": "é", "answer": "b"}, ensure_ascii=False)
    path.write_bytes(("\ufeff" + row + "\r\n\n   \n" + row + "\n" + row).encode())
    assert [made.where.rpartition(":")[2] for made in read(path)] == ["1", "4", "5"]
    assert len(read(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "said", "remedy"),
    [
        ('{"question": ', ":2: invalid JSON", "one JSON object"),
        ("[" * 100_000, ":2: invalid JSON", "one JSON object"),
        ([1], ":2: not an object", "messages"),
        ({"question": "q", "reply": "a"}, ":2: the row has no answer: there is no field 'answer'", "question, reply"),
        ({"question": "q", "answer": None}, ":2: the row has no answer", "data.answer_template"),
        ({"question": "q", "answer": " "}, ":2: the row has no answer: it is empty", "data.answer_template"),
        ({"question": "q", "answer": ["a"]}, ":2: the row has no answer: there is no text in", "answer_template"),
        ({"answer": "a"}, ":2: the row has no question", "data.question_template"),
        ({"messages": "x"}, ":2: 'messages' is text that is not JSON", "list"),
        ({"messages": {"role": "user"}}, ":2: 'messages' is not a list", "list"),
        ({"messages": [{"from": "human"}]}, ":2: message 1 has no known role", "role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, ":2: message 1 has no known role", "assistant"),
        ({"messages": [{"role": "user"}]}, ":2: message 1 (user) has no content", "text"),
        ({"messages": MESSAGES, "tools": [{}]}, ":2: a tool has no name", "parameters"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, row: object, said: str, remedy: str) -> None:
    path = jsonl(tmp_path, {"question": "q", "answer": "a"}, row)
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}{said}")
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == 2


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": "x"}\n\xff\xfe\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not UTF-8"):
        read(tmp_path / "rows.jsonl", question_template="{a}", answer_template="{a}")


def test_parquet_rows_lose_the_nulls_that_structs_add(tmp_path: Path) -> None:
    rows = [
        {"messages": MESSAGES, "tools": json.dumps([{"name": "add"}])},
        {"messages": [{"role": "user", "content": "q", "name": "n"}, MESSAGES[1]], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = read(tmp_path / "rows.parquet")
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert first.messages == MESSAGES and first.tools == [{"type": "function", "function": {"name": "add"}}]
    assert second.messages[0]["name"] == "n" and second.tools is None
    assert second.where.endswith("rows.parquet:2")


def test_damaged_parquet_other_kinds_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="not readable as Parquet"):
        read(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="not a kind of data"):
        read(tmp_path / "rows.csv")
    with pytest.raises(FathomError) as caught:
        read(tmp_path / "none.jsonl")
    assert caught.value.exit_code == 2 and "none.jsonl" in caught.value.message
    with pytest.raises(ConfigError, match="not a regular expression"):
        read(tmp_path / "rows.jsonl", strip_pattern="(")


def test_generated_rows(tmp_path: Path) -> None:
    train, heldout = read("generated:word-problems", 3), read("generated:word-problems:heldout", 3)
    assert len(train) == len(heldout) == 3 and train[0] != heldout[0]
    for wrong in ("generated:poems", "generated:word-problems:test"):
        with pytest.raises(DataError, match="no such generator"):
            read(wrong)
