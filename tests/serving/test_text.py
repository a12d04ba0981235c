"""Text streams and tints."""

import random

import pytest
from rich.text import Text

from fathom_serve.engine.request import Token
from fathom_serve.text.stream import TextStream
from fathom_serve.text.tint import legend, tint


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool, int]:
    """Push byte pieces as tokens; texts as released, whether a stop string was met, tokens used."""
    stream = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace"), stop)
    texts: list[str] = []
    for number in range(len(pieces)):
        texts += [token.text for token in stream.push(Token(number, "", 1, 0.0, ()))]
        if stream.stopped:
            return texts, True, number + 1
    return texts + [token.text for token in stream.finish()], False, len(pieces)


def test_half_characters_wait_for_their_other_half() -> None:
    texts, _, _ = run([b"a", b"\xe2", b"\x82", b"\xac", b"!"])
    assert texts == ["a", "", "", "€", "!"]
    assert run([b"a", b"\xe2\x82"])[0] == ["a", "\ufffd"], "at the end what is there is shown"


def test_a_stop_string_across_tokens_never_shows() -> None:
    texts, stopped, used = run([b"one ", b"EN", b"D", b" more"], ("END",))
    assert ("".join(texts), stopped, used) == ("one ", True, 3)
    texts, stopped, _ = run([b"one ", b"EN", b"T", b"END!"], ("END",))
    assert ("".join(texts), stopped) == ("one ENT", True)
    assert "".join(run([b"one ", b"EN"], ("END",))[0]) == "one EN", "an unfinished stop string is text"


def test_the_earliest_stop_string_wins() -> None:
    assert "".join(run([b"abcd", b"efgh"], ("gh", "cdef"))[0]) == "ab"


@pytest.mark.parametrize("seed", range(40))
def test_random_splits_give_the_text_before_the_first_stop(seed: int) -> None:
    rng = random.Random(seed)
    whole = "".join(rng.choice("abé€𝄞") for _ in range(30)).encode()
    stop = tuple("".join(rng.choice("abé") for _ in range(rng.randint(2, 4))) for _ in range(2))
    cuts = sorted(rng.sample(range(1, len(whole)), 12))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    text = whole.decode()
    found = [at for at in (text.find(word) for word in stop) if at >= 0]
    texts, stopped, _ = run(pieces, stop)
    assert stopped == bool(found)
    assert "".join(texts) == (text[: min(found)] if found else text)


def test_tint_keeps_the_text_and_marks_depths() -> None:
    pieces = [("a[b", 1), ("]", 1), ("c\\", 2), ("[/]", 2), ("d", 3)]
    rendered = Text.from_markup(tint(pieces))
    assert rendered.plain == "a[b]c\\[/]d"
    styles = {rendered.plain[span.start : span.end]: str(span.style) for span in rendered.spans}
    assert "bold" in styles["c\\[/]"] and styles["c\\[/]"] != styles["d"]
    assert tint([]) == ""
    assert "depth 3" in Text.from_markup(legend(3)).plain


@pytest.mark.parametrize("tail", ["\\", "\\\\", "[", "[/", "x\\["])
def test_tint_survives_backslashes_at_a_border(tail: str) -> None:
    assert Text.from_markup(tint([(tail, 1), ("z", 2), (tail, 2), (tail, 1)])).plain == tail + "z" + tail + tail


def test_an_answer_cannot_send_escape_sequences() -> None:
    assert Text.from_markup(tint([("a\x1b[31mb\r\n\tc\x9b", 2)])).plain == "a[31mb\n\tc"


@pytest.mark.parametrize("seed", range(60))
def test_tint_keeps_any_text(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [("".join(rng.choices("\\[]/#ab ", k=rng.randint(0, 6))), rng.randint(1, 3)) for _ in range(12)]
    assert Text.from_markup(tint(pieces)).plain == "".join(text for text, _ in pieces)
