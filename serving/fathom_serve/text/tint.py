"""Tokens tinted by their depth, as rich markup: one colour per depth, cool to hot, told apart in grey too."""

from collections.abc import Iterable

from rich.markup import escape

PLAIN = "default"
RAMP = ("#5fafff", "#ffd75f", "#ff875f", "#ff5f87", "#d787ff", "#af87ff", "#87d7ff", "#ffffff")
"""Colours of depths 2, 3, ...; depth 1 keeps the terminal's own colour."""


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
    # A backslash before our own bracket would escape it.
    safe = escape(text)
    return f"[{style(depth)}]{safe}[/]"
