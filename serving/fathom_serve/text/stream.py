"""Tokens to text, one at a time: half characters and possible stop strings are held back until they are settled."""

from collections.abc import Callable

from fathom_serve.engine.request import Token

INCOMPLETE = "\ufffd"


class TextStream:
    """Gives each token the text it adds; joined, the texts are the answer, without the stop string.

    Args:
        decode: token ids to text, special tokens left out.
        stop: texts that end the answer; may straddle tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = ()) -> None:
        self.decode = decode
        self.stop = stop
        self.stopped = False
        self._ids: list[int] = []
        # Ids before _known have their text. Decoding starts at _context, before them: a token's text can depend on
        # its neighbour.
        self._context = 0
        self._known = 0
        self._held: list[Token] = []

    def push(self, token: Token) -> list[Token]:
        """Add a token; returns the tokens whose text is settled, in order. Sets ``stopped`` at a stop string."""
        self._ids.append(token.id)
        piece = self._piece()
        whole = not piece.endswith(INCOMPLETE)
        self._held.append(token._replace(text=piece if whole else ""))
        if not whole:
            return []
        self._context, self._known = self._known, len(self._ids)
        return self._settle()

    def finish(self) -> list[Token]:
        """Everything still held back, when no more tokens come."""
        if self.stopped:
            return []
        if self._held and self._known < len(self._ids):
            self._held[-1] = self._held[-1]._replace(text=self._piece())
        held, self._held = self._held, []
        return held

    def _piece(self) -> str:
        before = self.decode(self._ids[self._context : self._known])
        return self.decode(self._ids[self._context :])[len(before) :]

    def _settle(self) -> list[Token]:
        text = "".join(token.text for token in self._held)
        found = [at for at in (text.find(word) for word in self.stop) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found), cut=True)
        return self._release(len(text) - self._possible_stop(text), cut=False)

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string may begin with."""
        longest = 0
        for word in self.stop:
            for length in range(min(len(word) - 1, len(text)), longest, -1):
                if text.endswith(word[:length]):
                    longest = length
                    break
        return longest

    def _release(self, length: int, cut: bool) -> list[Token]:
        """Let go of the tokens within the first ``length`` characters; ``cut`` also ends the answer there."""
        released: list[Token] = []
        used = 0
        while self._held and used + len(self._held[0].text) <= length:
            # At a cut, an empty token right at the border belongs to the stop string.
            if cut and used == length:
                break
            token = self._held.pop(0)
            used += len(token.text)
            released.append(token)
        if cut:
            if used < length:
                released.append(self._held[0]._replace(text=self._held[0].text[: length - used]))
            self._held = []
        return released
