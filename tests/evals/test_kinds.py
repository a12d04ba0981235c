"""Kinds of tokens, and depth by kind."""

from pathlib import Path

import pytest
import torch

from fathom.errors import DataError
from fathom.evals.batches import Sizes
from fathom.evals.depth_by_kind import depth_by_kind, group_by_kind
from fathom.evals.kinds import (
    CONTINUATION,
    DIGIT,
    KINDS,
    OPERATOR,
    SPACE,
    SPECIAL,
    WORD,
    kind_of,
    token_kinds,
    tokenizer_kinds,
)
from fathom.evals.plots import plot_kinds
from fathom.model.folder import load_tokenizer
from support.documents import Listed, random_documents
from support.models import tiny_model, tiny_tokenizer_files
from support.reference import decode


@pytest.mark.parametrize(
    ("piece", "before", "kind"),
    [
        ("7", "", DIGIT),
        (" 12,500", "s", DIGIT),
        ("3.5", "=", DIGIT),
        ("+", "1", OPERATOR),
        (" (", "f", OPERATOR),
        (".", "s", OPERATOR),
        ("Hello", "", WORD),
        (" world", "o", WORD),
        ("cat", "\n", WORD),
        ("ing", "k", CONTINUATION),
        ("rd", "3", CONTINUATION),
        ("n't", "o", CONTINUATION),
        ("quote", '"', WORD),
        ("\n\n", ".", SPACE),
        (" ", "a", SPACE),
        ("", "a", SPACE),
        (" é", "s", WORD),
    ],
)
def test_what_a_piece_is(piece: str, before: str, kind: str):
    assert kind_of(piece, before) == kind


def test_pieces_get_their_text_in_context():
    pieces = {0: "<end>", 1: "The", 2: " cat", 3: "s", 4: " ate", 5: " 1", 6: "2", 7: " =", 8: "\n"}

    def decode_pieces(ids: list[int]) -> str:
        # Like sentencepiece, this tokenizer drops a space at the start of what it decodes.
        return "".join(pieces[number] for number in ids).removeprefix(" ")

    ids = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 3]
    kinds = [SPECIAL, WORD, WORD, CONTINUATION, WORD, DIGIT, DIGIT, OPERATOR, SPACE, SPECIAL, WORD]
    assert token_kinds(ids, decode_pieces, frozenset({0})) == kinds


def test_a_real_byte_tokenizer(tmp_path: Path):
    tiny_tokenizer_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "<|im_start|>é 1+ab\n<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    # é is two bytes: the first begins a word, the second goes on with it.
    assert tokenizer_kinds(tokenizer)(ids) == [
        *(SPECIAL, WORD, CONTINUATION, SPACE, DIGIT, OPERATOR, WORD, CONTINUATION, SPACE, SPECIAL)
    ]


def test_depths_are_grouped_by_the_predicted_token_one_by_one():
    model, documents = tiny_model("tah2", 3, threshold=0.4).eval(), random_documents([9, 13, 6])
    found = depth_by_kind(model, documents, lambda _, ids: [["even", "odd"][token % 2] for token in ids], Sizes(16))
    wanted: dict[str, list[tuple[int, float]]] = {"even": [], "odd": []}
    with torch.no_grad():
        for number in range(3):
            rows = documents.rows(number)
            decoded = decode(model, rows)
            for t in range(rows.count):
                if rows.supervised[t]:
                    kind = "odd" if documents.documents[number][0][t + 1] % 2 else "even"
                    wanted[kind].append((int(decoded["executed"][t]), -float(decoded["log_prob"][t])))
    assert {row.kind for row in found.kinds} == {"even", "odd"}
    assert found.kinds[0].mean_depth > found.kinds[1].mean_depth, "deepest first"
    for row in found.kinds:
        depths = [depth for depth, _ in wanted[row.kind]]
        assert (row.tokens, row.mean_depth) == (len(depths), pytest.approx(sum(depths) / len(depths)))
        assert row.nll == pytest.approx(sum(loss for _, loss in wanted[row.kind]) / len(depths))
        assert {depth: count for depth, count in row.depth_counts.items() if count} == {
            depth: depths.count(depth) for depth in set(depths)
        }
    every = [depth for rows in wanted.values() for depth, _ in rows]
    assert (found.tokens, found.mean_depth) == (len(every), pytest.approx(sum(every) / len(every)))


def test_a_label_for_each_token_and_something_to_group():
    model = tiny_model("tah2", 2)
    with pytest.raises(ValueError, match="document 0 has 9 tokens and 8 labels"):
        depth_by_kind(model, random_documents([9]), lambda _, ids: ["a"] * (len(ids) - 1))
    with pytest.raises(DataError, match="no supervised token"):
        depth_by_kind(model, Listed([([1, 2], [False, False])]), lambda _, ids: ["a"] * len(ids))


def test_the_plot_names_every_kind(tmp_path: Path):
    found = group_by_kind([*KINDS, WORD], [1, 2, 1, 2, 1, 1, 2], [0.5] * 7)
    svg, png = plot_kinds(found, tmp_path)
    assert all(kind in svg.read_text() for kind in KINDS) and "1.50 of 2" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
