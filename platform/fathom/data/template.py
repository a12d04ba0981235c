"""One renderer: a conversation becomes token ids and the mask of what is learned; serving uses it too.

Invariant: ``prompt(messages[:i])`` followed by what the model is taught to generate is a prefix of
``render(messages).ids``, so training sees exactly what serving will show.
"""

import hashlib
import json
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from fathom.config.schema import ChatFormat, Supervise
from fathom.data.chat_formats import FORMATS, PLAIN
from fathom.data.encode import Encoder
from fathom.errors import ConfigError, DataError

Message = dict[str, Any]

PROBE = "fathom_probe"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object"}},
}


class Rendered(NamedTuple):
    """A conversation as tokens.

    Attributes:
        ids: token ids, up to the last supervised one (what follows it teaches nothing).
        supervised: per token, whether it is a training target: the assistant's content and the end-of-turn
            token behind it; never the generation prompt, never the whitespace after the end of the turn.
    """

    ids: list[int]
    supervised: list[bool]


class Turn(NamedTuple):
    """Where an assistant turn lies in the text: behind the generation prompt, to its end-of-turn token."""

    start: int
    stop: int


class Renderer:
    """Renders conversations with a tokenizer's chat template, in jinja's sandbox.

    A tokenizer without a template gets ChatML or Llama 3's format if it has the control tokens of one, else
    ``Role:\\ncontent`` blocks with the end-of-text token after each assistant turn.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        chat_format: one of :data:`fathom.data.chat_formats.FORMATS` instead of the tokenizer's own template.

    Raises:
        ConfigError: the tokenizer lacks the control tokens of the format.
        DataError: the tokenizer has neither a template nor an end-of-text token.
    """

    def __init__(self, tokenizer: Any, chat_format: ChatFormat | None = None) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        if chat_format is not None:
            self.template = self._named_template(chat_format)
        elif tokenizer.chat_template:
            self.template = str(tokenizer.get_chat_template())
        else:
            self.template = self._default_template()

    def _named_template(self, name: ChatFormat) -> str:
        template, needed = FORMATS[name]
        lacking = sorted(needed - self.encoder.specials)
        if lacking:
            raise ConfigError(
                f"data.chat_format {name!r} needs the special tokens {', '.join(lacking)}, which the tokenizer lacks",
                "choose the format of the model's family, or leave data.chat_format out",
            )
        return template

    def _default_template(self) -> str:
        for template, needed in FORMATS.values():
            if needed <= self.encoder.specials:
                return template
        if not self.tokenizer.eos_token:
            raise DataError(
                "the tokenizer has no chat template and no end-of-text token: an answer could not end",
                "give tokenizer_config.json a chat_template or an eos_token",
            )
        return PLAIN

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the template and the tokenizer: what the token ids depend on."""
        parts = [self.template, json.dumps(self.tokenizer.get_vocab(), sort_keys=True)]
        parts += [str(self.tokenizer.special_tokens_map)]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        parts += [backend.to_str()] if backend is not None else []
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the template's end-of-turn and the tokenizer's end-of-text token."""
        probe = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        eos = self.tokenizer.eos_token_id
        return frozenset({probe.ids[-1]} | (set() if eos is None else {eos}))

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, supervise: Supervise = "all"
    ) -> Rendered:
        """Token ids and mask of a whole conversation.

        Args:
            messages: with ``role`` and ``content``.
            tools: that the assistant may call.
            supervise: which assistant turns are learned. With ``last`` the turns before are what the template makes
                of them in the last one's prompt, so a template may rewrite them.

        Raises:
            DataError: the template refuses the conversation, rewrites earlier turns, ignores tools, tool calls or
                reasoning, or does not end an assistant turn with a special token.
        """
        messages, tools = self._prepare(messages, tools)
        if any(message.get("reasoning_content") for message in messages) and not self._writes_reasoning:
            raise DataError(
                "the chat template ignores reasoning_content",
                "write the reasoning into content, or set data.chat_format to qwen3",
            )
        asked = _asked_turns(messages)
        messages = messages[: asked[-1] + 1] if asked else messages  # what follows the last turn teaches nothing
        text = self._text(messages, tools)
        borders: list[tuple[int, bool]] = []
        for number in asked if supervise == "all" else asked[-1:]:
            turn = self._turn(messages, number, tools, text, strict=True)
            borders += [(turn.start, False), (turn.stop, True)] if turn else []
        if not borders:
            ids = self.encoder.encode(text)
            return Rendered(ids, [False] * len(ids))
        ids, done = [], ""
        if supervise == "last":
            ids, done = self._prompt(messages[: asked[-1]], tools)
        supervised = [False] * len(ids)
        for stop, learned in borders:
            ids = self._extend(ids, done, text[:stop])
            supervised += [learned] * (len(ids) - len(supervised))
            done = text[:stop]
        return Rendered(ids, supervised)

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids that ask for the next assistant turn, generation prompt included.

        A template that rewrites earlier turns is allowed here: the prompt is then simply what it makes of
        them.

        Raises:
            DataError: the template refuses the conversation or ignores the tools.
        """
        return self._prompt(*self._prepare(messages, tools))[0]

    def _prompt(self, messages: list[Message], tools: list[dict] | None) -> tuple[list[int], str]:
        """Ids and text of a prompt, of messages that :meth:`_prepare` gave."""
        text = self._text(messages, tools, ask=True)
        ids: list[int] = []
        done = ""
        for number in _asked_turns(messages):
            turn = self._turn(messages, number, tools, text, strict=False)
            if turn is None:
                break
            for stop in turn:
                ids = self._extend(ids, done, text[:stop])
                done = text[:stop]
        return self._extend(ids, done, text), text

    def _prepare(self, messages: list[Message], tools: list[dict] | None) -> tuple[list[Message], list[dict] | None]:
        """Messages and tools as templates expect them, guarded; refuses what would be ignored."""
        plain = [_plain_message(message) for message in messages]
        if tools and not self._writes_tools:
            raise DataError(
                "the chat template ignores tools",
                "use a model whose template writes them, set data.chat_format to qwen3 or llama3, or leave tools out",
            )
        if any(message.get("tool_calls") for message in plain) and not self._writes_tool_calls:
            raise DataError(
                "the chat template ignores tool calls",
                "use a model whose template writes them, or set data.chat_format to qwen3 or llama3",
            )
        return self.encoder.guard(plain), self.encoder.guard(tools or None)

    @cached_property
    def _writes_tools(self) -> bool:
        return PROBE in self._text([{"role": "user", "content": "a"}], [PROBE_TOOL], ask=True)

    @cached_property
    def _writes_tool_calls(self) -> bool:
        call = {"type": "function", "function": {"name": PROBE, "arguments": {}}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return PROBE in self._text(messages, None)

    @cached_property
    def _writes_reasoning(self) -> bool:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": PROBE},
        ]
        return PROBE in self._text(messages, None)

    def _text(self, messages: list[Message], tools: list[dict] | None, ask: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.template, add_generation_prompt=ask, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise DataError(
                f"the chat template refuses the conversation: {error}",
                "check the order of roles and the messages' fields",
            ) from error
        return str(text)

    def _turn(
        self, messages: list[Message], number: int, tools: list[dict] | None, text: str, strict: bool
    ) -> Turn | None:
        """Where an assistant turn lies in ``text``, the rendering of ``messages`` (a prompt when not strict).

        None, or an error when strict, where the text does not hold the turn as serving would show and stop it.
        """
        before = self._text(messages[:number], tools, ask=True)
        last = number == len(messages) - 1
        through = text if last and strict else self._text(messages[: number + 1], tools)
        end = self.encoder.last_control(through[len(before) :])
        fault, remedy = "", ""
        if not through.startswith(before):
            fault = "the chat template's generation prompt is not how it writes the answer that follows"
            remedy = "use a template that writes an answer right after its generation prompt"
        elif not text.startswith(through):
            fault = "the chat template rewrites earlier turns, so training would not see what serving shows"
            remedy = "set data.supervise to last, or data.chat_format to a format that leaves earlier turns alone"
        elif end is None or through[len(before) + end.end() :].strip():
            fault = "the chat template does not end an assistant turn with a special token: no answer would end"
            remedy = "put an end-of-turn token behind the assistant's content in the template"
        if end is not None and not fault:
            return Turn(len(before), len(before) + end.end())
        if strict:
            raise DataError(f"message {number + 1}: {fault}", remedy)
        return None

    def _extend(self, ids: list[int], done: str, text: str) -> list[int]:
        """Ids of ``text`` that begin with ``ids``, those of its beginning ``done``.

        Normally the tokens of the whole text. Where a token would straddle the border (an answer that starts
        with a line break), the rest is tokenised by itself: at serving time the prompt's tokens are fixed
        before the answer.
        """
        whole = self.encoder.encode(text)
        if whole[: len(ids)] == ids:
            return whole
        apart = ids + self.encoder.encode(text[len(done) :])
        if not self.encoder.spells(apart, text):
            raise DataError(
                "the tokenizer merges the generation prompt with the answer and cannot tokenise them apart",
                "use a template whose generation prompt ends with a special token or a line break",
            )
        return apart


def _asked_turns(messages: list[Message]) -> list[int]:
    """Numbers of the assistant messages that answer; one before any user or tool message is context."""
    first = next(
        (n for n, message in enumerate(messages) if message["role"] not in ("assistant", "system", "developer")), None
    )
    return [] if first is None else [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]


def _plain_message(message: Message) -> Message:
    """A message as templates expect it: text content, tool-call arguments as objects, no nulls."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise DataError("a message has content that is not text", "keep the parts of type text only")
        content = "".join(part["text"] for part in content)
    plain["content"] = content
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(
                f"a tool call's arguments are not JSON: {error}", "write the arguments as an object"
            ) from error
    kept = {"name": function.get("name"), "arguments": arguments}
    return {**({"id": call["id"]} if "id" in call else {}), "type": "function", "function": kept}
