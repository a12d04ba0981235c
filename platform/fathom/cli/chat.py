"""``fathom chat``: talk to an endpoint in the terminal; every token is tinted by its depth."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.console import Console

HELP = "/depth N limits the depth (/depth off), /tau X moves the threshold (/tau off), /reset forgets, /exit leaves."


def chat(
    endpoint: Annotated[str, typer.Option(help="Base URL.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Default: the endpoint's first.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, tokens; default what fits.", min=1, show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.", min=0, max=2)] = 0.0,
    tau_exit: Annotated[
        float | None, typer.Option(help="Go deeper above this continue probability.", min=0, max=1, show_default=False)
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="At most so many depths.", min=1, show_default=False)] = None,
    api_key: Annotated[str, typer.Option(help="Sent as bearer token.", envvar="OPENAI_API_KEY")] = "none",
) -> None:
    """Talk to an endpoint. Lines of stdin are what you say; answers stream, tinted by depth."""
    from openai import OpenAI
    from rich.console import Console

    client = OpenAI(base_url=endpoint, api_key=api_key, max_retries=0, timeout=600)
    console = Console(highlight=False, soft_wrap=True)
    card = pick_model(client, endpoint, model)
    talk = Talk(client, console, card["id"], system, max_tokens, temperature)
    talk.set_depth(tau_exit, max_depth)
    greet(console, card)
    while (line := read_line(console)) is not None:
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            talk.command(line)
        elif line:
            talk.say(line)


def pick_model(client: "OpenAI", endpoint: str, wanted: str | None) -> dict[str, Any]:
    """The endpoint's description of the model.

    Raises:
        ServiceError: the endpoint does not answer.
        ConfigError: it has no such model.
    """
    import openai

    from fathom.errors import ConfigError, ServiceError

    try:
        models = [model.model_dump() for model in client.models.list().data]
    except openai.OpenAIError as error:
        raise ServiceError(
            f"{endpoint} does not answer: {error}", "start one with `fathom deploy MODEL`, or give --endpoint"
        ) from error
    for model in models:
        if wanted in (None, model["id"]):
            return model
    raise ConfigError(f"{endpoint} has no model {wanted!r}", f"it has: {', '.join(m['id'] for m in models) or 'none'}")


def greet(console: "Console", card: dict[str, Any]) -> None:
    """Who is there, what the tints mean, and the commands."""
    from rich.markup import escape

    from fathom_serve.text.tint import legend

    depths = (card.get("depth") or {}).get("max_depth", 1)
    console.print(f"[bold]{escape(card['id'])}[/]   {legend(depths)}")
    if sys.stdin.isatty():
        console.print(f"[dim]{escape(HELP)}[/]")


def read_line(console: "Console") -> str | None:
    """What the person says next; None at the end."""
    try:
        return (console.input("\n[bold]you[/] ") if sys.stdin.isatty() else input()).strip()
    except (EOFError, KeyboardInterrupt):
        return None


class Talk:
    """A conversation with an endpoint.

    Args:
        client: an ``openai`` client.
        console: where answers go.
        model: name of the model.
        system: system prompt.
        max_tokens: longest answer; None leaves it to the endpoint.
        temperature: of the sampling.
    """

    def __init__(
        self,
        client: "OpenAI",
        console: "Console",
        model: str,
        system: str | None,
        max_tokens: int | None,
        temperature: float,
    ) -> None:
        self.client = client
        self.console = console
        self.model = model
        self.limits: dict[str, Any] = {"temperature": temperature}
        self.limits |= {} if max_tokens is None else {"max_tokens": max_tokens}
        self.opening: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.depth: dict[str, Any] = {"return": "tokens"}

    def set_depth(self, tau_exit: float | None, max_depth: int | None) -> None:
        """The dial; None leaves it to the model."""
        asked = {"tau_exit": tau_exit, "max_depth": max_depth}
        self.depth = {"return": "tokens"} | {key: value for key, value in asked.items() if value is not None}

    def command(self, line: str) -> None:
        """One of the slash commands."""
        word, _, value = line.partition(" ")
        kinds = {"/depth": ("max_depth", int), "/tau": ("tau_exit", float)}
        if word == "/reset":
            self.messages = list(self.opening)
        elif word in kinds and value:
            key, kind = kinds[word]
            self.depth.pop(key, None)
            try:
                self.depth |= {} if value == "off" else {key: kind(value)}
            except ValueError:
                self.console.print(f"{word} takes a number or off", markup=False)
        else:
            self.console.print(HELP, markup=False)

    def say(self, text: str) -> None:
        """Ask, and print the answer as it comes; an error leaves the conversation as it was."""
        import openai

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self._stream(asked)
        except openai.APIError as error:
            self.console.print(f"error: {error.message}", style="red", markup=False)
        except KeyboardInterrupt:
            self.console.print("\n[dim]stopped[/]")
        else:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        from fathom_serve.text.tint import tint

        began, text, usage = time.monotonic(), "", None
        create: Any = self.client.chat.completions.create
        with create(
            model=self.model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"depth": self.depth},
            **self.limits,
        ) as chunks:
            for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content = choice.delta.content or ""
                    told = (choice.model_extra or {}).get("depth") or {"tokens": [{"text": content, "depth": 1}]}
                    self.console.print(tint((each["text"], each["depth"]) for each in told["tokens"]), end="")
                    text += content
        self.console.print()
        self._report(usage, time.monotonic() - began)
        return text

    def _report(self, usage: Any, seconds: float) -> None:
        if usage is not None:
            depth = (usage.model_extra or {}).get("depth") or {}
            mean = f", mean depth {depth['mean']:.2f}" if depth.get("mean") else ""
            rate = usage.completion_tokens / seconds
            self.console.print(f"[dim]{usage.completion_tokens} tokens{mean}, {rate:.1f} tokens/s[/]")
