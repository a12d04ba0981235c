"""Conversations that share text with an evaluation file are found, dropped and counted."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.config.schema import DataConfig
from fathom.data.overlap import Overlap, ngrams
from fathom.data.prepared import prepare
from fathom.data.template import Renderer
from fathom.errors import DataError
from support.tokenizers import CHATML, tiny_tokenizer

RENDERER = Renderer(tiny_tokenizer(CHATML))


def write(path: Path, *rows: tuple[str, str]) -> str:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return str(path)


TEXTS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=9)


@given(TEXTS, TEXTS, st.integers(1, 4))
def test_ngrams_meet_where_a_slow_search_finds_a_common_run(one: list[str], two: list[str], words: int) -> None:
    runs = range(len(one) - words + 1), range(len(two) - words + 1)
    slow = any(one[i : i + words] == two[j : j + words] for i in runs[0] for j in runs[1])
    assert bool(set(ngrams(" ".join(one), words)) & set(ngrams(", ".join(two).upper(), words))) == slow


def test_shared_questions_and_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    evaluation = write(
        tmp_path / "eval.jsonl",
        ("Natalia sold clips to 48 friends; how many?", "She sold 48 of them in all."),
        ("Why?", "No."),
    )
    train = write(
        tmp_path / "train.jsonl",
        ("How many apples are left?", "She has 12 apples now."),
        ("Hm: natalia sold CLIPS\nto 48 friends!", "Something else."),
        ("Count them.", "Well, she sold 48 of them, that is all."),
        ("Why?", "No."),
    )
    cfg = DataConfig(
        train=train, heldout=evaluation, context_tokens=200, decontaminate_against=evaluation, decontaminate_words=5
    )
    data = prepare(cfg, "train", RENDERER, tmp_path / "train")
    assert data.counts["dropped"] == {"contaminated": 2}
    assert [data.where(number).rpartition(":")[2] for number in range(len(data))] == ["1", "4"]
    assert data.counts["evaluation"] == {"rows": 2, "ngrams": 4 + 3, "short_messages": 2}
    assert data.counts["dropped_tokens"] > 0 and data.made_from["decontaminate_words"] == 5
    clean = cfg.model_copy(update={"decontaminate_words": 7})
    assert prepare(clean, "train", RENDERER, tmp_path / "clean").counts["dropped"] == {}
    heldout = prepare(cfg, "heldout", RENDERER, tmp_path / "heldout")
    assert len(heldout) == 2 and "evaluation" not in heldout.counts, "only training data is compared"


def test_other_evaluation_data_is_other_data(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "eval.jsonl", ("one two three", "four five six"))
    train = write(tmp_path / "train.jsonl", ("seven", "eight"))
    cfg = DataConfig(train=train, decontaminate_against=evaluation, decontaminate_words=3)
    prepare(cfg, "train", RENDERER, tmp_path / "out")
    write(tmp_path / "eval.jsonl", ("one two three", "four five seven"))
    with pytest.raises(DataError, match="other decontaminate_sha256"):
        prepare(cfg, "train", RENDERER, tmp_path / "out")


def test_a_system_prompt_that_all_share_is_no_overlap(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "eval.jsonl", ("one two three", "four"))
    cfg = DataConfig(
        train="unused", system_prompt="be brief and kind", decontaminate_against=evaluation, decontaminate_words=3
    )
    overlap = Overlap(cfg)
    told = {"role": "system", "content": "be brief and kind"}
    assert not overlap.touches([told, {"role": "user", "content": "five"}])
    parts = [{"type": "text", "text": "zero one"}, {"type": "text", "text": "two three"}]
    assert overlap.touches([{"role": "user", "content": parts}])


def test_an_evaluation_file_that_could_never_match_is_refused(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "eval.jsonl", ("too short", "to match"))
    with pytest.raises(DataError, match="has 13 words: nothing could match"):
        Overlap(DataConfig(train="unused", decontaminate_against=evaluation))


def test_reasoning_and_tool_calls_are_compared_too(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "eval.jsonl", ("How many?", "She sold 48 of them in all."))
    overlap = Overlap(DataConfig(train="unused", decontaminate_against=evaluation, decontaminate_words=5))
    call = {"type": "function", "function": {"name": "note", "arguments": {"text": "she sold 48 of them"}}}
    assert overlap.touches([{"role": "assistant", "content": "42", "reasoning_content": "So she sold 48 of them."}])
    assert overlap.touches([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert not overlap.touches([{"role": "tool", "content": "She sold 48 of them in all."}])
