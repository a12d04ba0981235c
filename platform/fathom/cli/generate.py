"""``fathom generate``: answer one prompt in this process, without a server."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fathom_serve.api.backend import Generation
    from fathom_serve.deploy.service import EngineService
    from fathom_serve.engine.request import Finished, Token


def generate(
    model: Annotated[str, typer.Argument(help="models:/NAME@ALIAS, a folder, a URI, or a hub id.")],
    prompt: Annotated[str, typer.Argument(help="What the user says; - reads it from stdin.")],
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, tokens.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.", min=0, max=2)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Mass of tokens to sample from.", min=0.000001, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    tau_exit: Annotated[
        float | None, typer.Option(help="Go deeper above this continue probability.", min=0, max=1, show_default=False)
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="At most so many depths.", min=1, show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow server; default the local stack's.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, tokens with depths, and usage as JSON.")] = False,
) -> None:
    """Answer one prompt. On a terminal the answer is tinted by depth."""
    import asyncio

    from fathom.orchestrate.stack import stack_state
    from fathom_serve.api.backend import Generation
    from fathom_serve.deploy.service import EngineService
    from fathom_serve.deploy.source import inspect, local_folder, resolve
    from fathom_serve.engine.limits import EngineLimits
    from fathom_serve.engine.request import Depth

    source = resolve(model, tracking_uri or stack_state().get("mlflow_uri"))
    inspect(source)
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    generation = Generation(
        "generate", tuple(messages), max_tokens, temperature, top_p, seed, (), None, Depth(tau_exit, max_depth)
    )
    service = EngineService(local_folder(source), source, EngineLimits(max_active=1), dtype)
    try:
        tokens, finished = asyncio.run(answer(service, generation, live=not as_json))
    finally:
        service.close()
    if as_json:
        print_json(tokens, finished)


async def answer(service: "EngineService", generation: "Generation", live: bool) -> tuple[list["Token"], "Finished"]:
    """Run it; when ``live``, print each token as it is settled.

    Raises:
        ConfigError: the engine refuses the request.
    """
    from rich.console import Console

    from fathom.errors import ConfigError
    from fathom_serve.engine.request import Failed, Finished, Progress
    from fathom_serve.text.tint import tint

    console = Console(highlight=False, soft_wrap=True)
    tokens: list[Token] = []
    async for batch in service.generate(generation):
        for event in batch:
            if isinstance(event, Failed):
                raise ConfigError(f"{event.param or 'request'}: {event.message}", "change the request and run it again")
            if isinstance(event, Progress):
                tokens += event.tokens
                if live:
                    console.print(tint((token.text, token.depth) for token in event.tokens), end="")
            if isinstance(event, Finished):
                if live:
                    console.print()
                    print_summary(event)
                return tokens, event
    raise RuntimeError("the engine ended without finishing the answer")


def print_summary(finished: "Finished") -> None:
    """Legend and mean depth, on a terminal only."""
    from rich.console import Console

    from fathom_serve.text.tint import legend

    if sys.stderr.isatty():
        usage = finished.usage
        Console(stderr=True).print(
            f"[dim]{usage.tokens} tokens, mean depth {usage.mean or 0:.2f}[/]   {legend(len(usage.histogram))}"
        )


def print_json(tokens: list["Token"], finished: "Finished") -> None:
    """The whole answer for machines."""
    import json

    from fathom_serve.api.chat import usage

    body = {
        "text": "".join(token.text for token in tokens),
        "tokens": [{"id": token.id, "text": token.text, "depth": token.depth} for token in tokens],
        "finish_reason": finished.reason,
        "usage": usage(finished.usage),
    }
    typer.echo(json.dumps(body, ensure_ascii=False))
