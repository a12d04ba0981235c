"""Tokens tinted by their depth, as rich markup: one colour per depth, cool to hot, told apart in grey too."""

import re
from collections.abc import Iterable

PLAIN = "default"
RAMP = ("#5fafff", "#ffd75f", "#ff875f", "#ff5f87", "#d787ff", "#af87ff", "#87d7ff", "#ffffff")
"""Colours of depths 2, 3, ...; depth 1 keeps the terminal's own colour."""

SLASH = "\\"
BRACKET = re.compile(r"(\\*)(\[(?:[a-z#/@][^\[]*?\])?)")
CONTROLS = dict.fromkeys(set(range(32)) - {9, 10} | set(range(127, 160)))
"""Dropped: a model's answer must not move the cursor or send escape sequences to a terminal."""


def style(depth: int) -> str:
    """The rich style of a depth: the terminal's colour for 1, bold and coloured from 2 on."""
    if depth <= 1:
        return PLAIN
    return f"bold {RAMP[min(depth - 2, len(RAMP) - 1)]}"


def tint(pieces: Iterable[tuple[str, int]]) -> str:
    """Rich markup of (text, depth) pieces; brackets in the text stay text.

    Neighbours of the same depth share one tag, so that an escape never straddles two pieces.
    """
    parts: list[str] = []
    text, depth = "", 1
    for piece, at in pieces:
        if at != depth and text:
            parts.append(_tagged(text, depth))
            text = ""
        text, depth = text + piece, at
    return "".join([*parts, _tagged(text, depth)] if text else parts)


def legend(max_depth: int) -> str:
    """Rich markup that names each depth in its own style."""
    shown = (f"[{style(depth)}]depth {depth}[/]" for depth in range(1, max_depth + 1))
    return " · ".join(shown)


def _tagged(text: str, depth: int) -> str:
    shown = text.translate(CONTROLS)
    body = shown.rstrip("\\")
    # Backslashes before our own bracket would escape it, so each becomes two.
    return f"[{style(depth)}]{BRACKET.sub(_literal, body)}{2 * (len(shown) - len(body)) * SLASH}[/]"


def _literal(match: re.Match[str]) -> str:
    """A bracket as text.

    Rich halves the backslashes before what looks like a tag, and drops one before any other bracket; its own
    ``escape`` forgets the latter.
    """
    slashes, bracket = match.groups()
    if len(bracket) > 1:
        return (2 * len(slashes) + 1) * SLASH + bracket
    return (len(slashes) + bool(slashes)) * SLASH + bracket
