"""Which layers run once before the loop, again and again in it, and once after it: prelude, body, coda."""

from typing import NamedTuple

from fathom.errors import ConfigError, nearest


class Span(NamedTuple):
    """How many layers each part has, in the order of the stack."""

    prelude: int
    body: int
    coda: int

    @property
    def layers(self) -> int:
        """Layers in all."""
        return sum(self)


RULES = ("all", "thirds", "quarters", "ends", "loopus")
"""Named splits; a recipe may also give three numbers."""


def resolve_span(span: str | tuple[int, int, int], layers: int) -> Span:
    """The split of a stack of ``layers``.

    * ``all``: every layer is looped (TaH, TaH2, Ouro).
    * ``thirds``: head, body and tail of AbbIE; the body takes the remainder.
    * ``quarters``: the middle half is looped (the TaH2 authors' Huginn: layers 8-21 of 28).
    * ``ends``: all but the first and the last layer (MoR's Middle-Cycle).
    * ``loopus``: two layers before, one after (LoopUS on Qwen3).

    Raises:
        ConfigError: an unknown rule, or fewer layers than the split needs.
    """
    if isinstance(span, str):
        if span not in RULES:
            raise ConfigError(f"method.span: unknown span {span!r}", f"{nearest(span, RULES)}, or three numbers")
        outer = {
            "all": (0, 0),
            "thirds": (layers // 3, layers // 3),
            "quarters": (layers // 4, layers // 4),
            "ends": (1, 1),
            "loopus": (2, 1),
        }[span]
        span = (outer[0], layers - sum(outer), outer[1])
    if len(span) != 3 or min(span) < 0 or span[1] < 1 or sum(span) != layers:
        raise ConfigError(
            f"method.span: {tuple(span)} does not split {layers} layers into prelude, body and coda",
            f"give three numbers that sum to {layers}, the middle one at least 1",
        )
    return Span(*span)
