"""What a chat request may say. Unknown fields are refused; unsupported ones take only their neutral value."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_MESSAGES = 1024
MAX_CONTENT_CHARS = 1 << 20
MAX_STOPS = 4
MAX_STOP_CHARS = 256


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(_Body):
    """A part of a message's content; only text."""

    type: Literal["text"]
    text: str = Field(max_length=MAX_CONTENT_CHARS)


class Message(_Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_CONTENT_CHARS)] | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it; templates know no developer, who is a system."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class ResponseFormat(_Body):
    """Only plain text."""

    type: Literal["text"]


class DepthOptions(_Body):
    """Fathom's own dial.

    Attributes:
        tau_exit: go on to the next depth iff the continue probability is above this; default the model's.
        max_depth: at most so many depths; default the model's.
        return: ``tokens`` adds to each choice the texts of its tokens with their depths.
    """

    tau_exit: float | None = Field(default=None, ge=0.0, le=1.0)
    max_depth: int | None = Field(default=None, ge=1)
    returned: Literal["none", "tokens"] = Field(default="none", alias="return")


def _stops(value: str | list[str] | None) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else tuple(value or ())
    if len(words) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings")
    if any(not word or len(word) > MAX_STOP_CHARS for word in words):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return words


class ChatRequest(_Body):
    """Body of ``POST /v1/chat/completions``."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[str | list[str] | None, AfterValidator(_stops)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    depth: DepthOptions = DepthOptions()
    user: str | None = None
    # Accepted where they change nothing, since clients send them as a matter of course.
    n: Literal[1] | None = None
    presence_penalty: float | None = Field(default=None, ge=0.0, le=0.0)
    frequency_penalty: float | None = Field(default=None, ge=0.0, le=0.0)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    tools: list[Any] | None = Field(default=None, max_length=0)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def check(self) -> "ChatRequest":
        """Rules that span fields."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer asked for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return _stops(self.stop)
