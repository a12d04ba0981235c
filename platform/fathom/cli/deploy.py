"""``fathom deploy``: a model behind an OpenAI-compatible endpoint, on Ray Serve."""

import logging
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fathom_serve.deploy.source import Source


def deploy(
    model: Annotated[str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, a folder, or a URI.")],
    port: Annotated[int, typer.Option(help="Port of the endpoint on 127.0.0.1.", min=1, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; default its own name.", show_default=False)
    ] = None,
    replicas: Annotated[int, typer.Option(help="Engine replicas.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Torch threads of a replica; default all cores.", min=1, show_default=False)
    ] = None,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica.", min=0)] = 0.0,
    kv_memory_mb: Annotated[int, typer.Option(help="Keys and values of a replica, MiB.", min=1)] = 512,
    max_depth: Annotated[
        int | None, typer.Option(help="Passes at most, also above the trained M.", min=1, show_default=False)
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow server; default the local stack's.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Serve configuration and stop.")] = False,
) -> None:
    """Serve a model. Uses the local stack's Ray when it is up, else starts Ray here and serves until Ctrl-C."""
    import yaml

    from fathom.orchestrate.jobs import passed_environment
    from fathom.orchestrate.stack import stack_state
    from fathom_serve.deploy.apply import apply, serve_config
    from fathom_serve.deploy.source import inspect, resolve

    state = stack_state()
    source = resolve(model, tracking_uri or state.get("mlflow_uri"))
    inspect(source)
    limits = {"kv_memory_mb": kv_memory_mb} | ({"max_depth": max_depth} if max_depth else {})
    args = application_args(source._replace(name=name or source.name), replicas, dtype, threads, gpus, limits)
    if dry_run:  # without the environment, which holds keys
        config = serve_config(args, port)
        typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
        return
    owned = connect(state, port)
    endpoint = apply(serve_config(args, port, passed_environment()), report)
    announce(endpoint, args["name"], owned)
    if owned:
        serve_until_interrupted()


def application_args(
    source: "Source", replicas: int, dtype: str, threads: int | None, gpus: float, limits: dict[str, int]
) -> dict[str, Any]:
    """Arguments of the application; only what differs from its defaults.

    Raises:
        ConfigError: an argument is wrong.
    """
    from fathom_serve.deploy.arguments import parse

    args: dict[str, Any] = {"model": source.uri, "name": source.name}
    if source.version is not None:
        args |= {"version": source.version, "digest": source.digest}
    args |= {"replicas": replicas, "dtype": dtype, "limits": limits}
    args |= ({"threads": threads} if threads else {}) | ({"engine_gpus": gpus} if gpus else {})
    parse(args)
    return args


def connect(state: dict[str, str], port: int) -> bool:
    """Connect to the local stack's Ray, or start Ray in this process; True for the latter.

    Raises:
        ServiceError: the port is taken, or the stack's Ray does not answer.
    """
    import os

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from fathom.errors import ServiceError
    from fathom.orchestrate.stack import use_stack
    from fathom_serve.deploy.apply import require_port

    if state:
        use_stack(state)
    else:
        require_port(port)
    import ray

    report(f"connecting to Ray at {state['ray_address']}" if state else "starting Ray in this process")
    try:
        if state:
            ray.init(address=state["ray_address"], namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                num_cpus=max(2, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=256 * 2**20,
                _node_ip_address="127.0.0.1",
            )
    # Ray has no exception of its own for a start that takes too long.
    except Exception as error:
        where, remedy = "in this process", "free some memory and CPU, or start a stack with `fathom up` first"
        if state:
            where, remedy = f"at {state['ray_address']}", "run `fathom down` and `fathom up`"
        raise ServiceError(f"Ray {where} does not answer: {error}", remedy) from error
    return not state


def report(line: str) -> None:
    """Progress goes to stderr, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def announce(endpoint: str, name: str, owned: bool) -> None:
    """Where it is, and a line to try it."""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 17 + 25?"}}], "max_tokens": 100}}'
    typer.echo(f"endpoint  {endpoint}")
    typer.echo(f"model     {name}")
    typer.echo(f"try       curl {endpoint}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    typer.echo(f"chat      fathom chat --endpoint {endpoint}")
    if owned:
        report("serving from this process; Ctrl-C stops it")


def serve_until_interrupted() -> None:
    """Keep the Ray that this process started, until Ctrl-C."""
    import ray
    from ray import serve

    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        report("stopping")
    finally:
        serve.shutdown()
        ray.shutdown()
