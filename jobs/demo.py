"""The whole product once, on this machine: what `make demo` runs.

Post-trains SmolLM2-135M into a model that may think twice about a token, on generated word problems, then deploys it
and asks it three questions, one of them twice. `KEEP=1` leaves Ray, MLflow and the endpoint running; `PICTURE=file.svg`
draws the answers.
"""

import asyncio
import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ray
from openai import AsyncOpenAI
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.table import Table

from fathom.config.load import load_recipe
from fathom.config.schema import RunConfig
from fathom.data.word_problems import WordProblem, word_problem
from fathom.errors import FathomError, ServiceError
from fathom.evals.grade import is_correct
from fathom.model.hub import resolve_base
from fathom.model.methods import method_of
from fathom.orchestrate.processes import claim_port
from fathom.orchestrate.run import RunResult, run_recipe
from fathom.orchestrate.stack import Ports, stack_state, start_stack, stop_stack, use_stack
from fathom_serve.deploy.apply import apply, serve_config
from fathom_serve.text.tint import legend, tint

RECIPE = Path(__file__).parent / "recipes" / "tah2-demo.yaml"
STEPS = 5
QUESTIONS = 3
DIAL = 0.4  # tau_exit of the repeated question: below the trained 0.5, so more tokens think twice
KEEP = os.environ.get("KEEP", "") not in ("", "0")
PICTURE = os.environ.get("PICTURE")

console = Console(highlight=False)
begin = time.monotonic()


class Endpoint(NamedTuple):
    """Where a model answers, and what requests call it."""

    url: str
    model: str


class Answer(NamedTuple):
    """A question, what the model said, the depth of every piece of it, and the threshold that was asked for."""

    problem: WordProblem
    text: str
    pieces: list[tuple[str, int]]
    tau_exit: float

    @property
    def mean_depth(self) -> float:
        return sum(depth for _, depth in self.pieces) / max(len(self.pieces), 1)


def main() -> None:
    """Run the five steps."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    step(1, "start the local stack: Ray, MLflow, a folder as object store")
    with local_stack() as state:
        config = load_recipe(RECIPE, [f"storage={state['store']}", f"tracking.uri={state['mlflow_uri']}"])
        step(2, f"fetch {config.model.base}")
        say(f"in {resolve_base(config.model.base)}")
        step(3, f"post-train it on {config.parallel.workers} Ray Train workers, {config.train.steps} steps")
        result = run_recipe(config, fresh=True)
        if not result.finished:
            sys.exit("stopped")
        show_scores(result)
        if result.registered_as is None:
            raise ServiceError(
                "the model was not registered: MLflow did not answer", "look at .fathom/stack/mlflow.log"
            )
        step(4, f"deploy models:/{result.registered_as}@champion to Ray Serve")
        endpoint = deploy(result.registered_as, state)
        step(5, f"ask {QUESTIONS} held-out questions through the OpenAI client")
        asked = time.monotonic()
        answers = asyncio.run(ask(endpoint, method_of(config.method).threshold))
        show_speed(answers, time.monotonic() - asked)
        show_answers(answers, config, console)
        if PICTURE:
            draw(answers, config, PICTURE)
        show_where_to_look(state, endpoint, result)
    if not KEEP:
        say("stopped everything; KEEP=1 make demo leaves it running")


@contextlib.contextmanager
def local_stack() -> Iterator[dict[str, str]]:
    """A local stack of the demo's own, stopped again on every way out unless KEEP=1."""
    if stack_state():
        raise ServiceError("a local stack is running in this folder", "stop it with `.venv/bin/fathom down`")
    try:
        state = start_stack(Ports(0, 0, 0), progress=say)
        use_stack(state)
        os.environ["RAY_ADDRESS"] = state["ray_address"]
        yield state
    finally:
        ray.shutdown()  # leave the cluster before it goes, or Ray ends this process
        if not KEEP:
            stop_stack()


def deploy(name: str, state: dict[str, str]) -> Endpoint:
    """Serve the champion of a registered model on the stack's Ray, on port 8000 if that is free."""
    try:
        port = claim_port("endpoint", 8000)
    except ServiceError:
        port = claim_port("endpoint", 0)
    args = {"model": f"models:/{name}@champion", "tracking_uri": state["mlflow_uri"]}
    return Endpoint(apply(serve_config(args, port), progress=say), name)


async def ask(endpoint: Endpoint, threshold: float) -> list[Answer]:
    """Ask problems that were never trained on, all at once: their tokens share forwards, whatever their depths."""
    problems = [word_problem(index, "heldout") for index in range(QUESTIONS)]
    asked = [(problem, threshold) for problem in problems] + [(problems[-1], DIAL)]
    async with AsyncOpenAI(base_url=endpoint.url, api_key="none", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(ask_one(client, endpoint.model, problem, tau) for problem, tau in asked))


async def ask_one(client: AsyncOpenAI, model: str, problem: WordProblem, tau_exit: float) -> Answer:
    """Ask one problem; `depth` is Fathom's own part of the request and of the answer."""
    reply = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": problem["question"]}],
        temperature=0,
        max_tokens=96,
        extra_body={"depth": {"tau_exit": tau_exit, "return": "tokens"}},
    )
    choice = reply.choices[0]
    pieces = [(piece["text"], piece["depth"]) for piece in (choice.model_extra or {})["depth"]["tokens"]]
    return Answer(problem, choice.message.content or "", pieces, tau_exit)


def show_scores(result: RunResult) -> None:
    """Held-out likelihood of the base model, the converted model before its first step, and the trained one."""
    table = Table("held out", "NLL", "mean depth", "continuing", box=None, pad_edge=False)
    names = {"base": "base model", "converted": "converted, step 0", "trained": f"after {result.steps} steps"}
    for key, label in names.items():
        report = result.heldout[key]
        share = report["share_continuing"].get("1", 0.0)
        table.add_row(label, f"{report['nll']:.4f}", f"{report['mean_depth']:.3f}", f"{share:.1%}")
    console.print(table)
    say(f"{result.train_seconds:.0f} s of training, {result.tokens_per_second:.0f} tokens/s")


def show_speed(answers: list[Answer], seconds: float) -> None:
    """Tokens per second of all requests together, prompts included in the time."""
    tokens = sum(len(answer.pieces) for answer in answers)
    say(f"{len(answers)} requests at once: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s")


def show_answers(answers: list[Answer], config: RunConfig, out: Console) -> None:
    """Questions and answers, every token in the colour of its depth."""
    before = None
    for answer in answers:
        if answer.problem != before:
            out.print(f"\n{answer.problem['question']}", style="bold", markup=False)
        before = answer.problem
        out.print(tint(answer.pieces))
        right = is_correct(answer.text, answer.problem["result"])
        verdict = "[green]right[/]" if right else f"[red]wrong[/], the answer is {answer.problem['result']}"
        out.print(f"[dim]tau_exit {answer.tau_exit}, mean depth {answer.mean_depth:.2f}[/] · {verdict}")
    out.print(f"\n{legend(method_of(config.method).max_depth)}")


def draw(answers: list[Answer], config: RunConfig, file: str) -> None:
    """The answers as an SVG."""
    canvas = Console(record=True, width=88, file=io.StringIO(), force_terminal=True, highlight=False)
    show_answers(answers, config, canvas)
    # Without the fonts that the template would have fetched from elsewhere.
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    canvas.save_svg(file, title="fathom", code_format=template)


def show_where_to_look(state: dict[str, str], endpoint: Endpoint, result: RunResult) -> None:
    """Addresses, and a line to copy."""
    body = f'{{"model": "{endpoint.model}", "messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}'
    console.print()
    say(f"run and curves  {result.run_url or state['mlflow_uri']}")
    say(f"endpoint        {endpoint.url}")
    say(f"try             curl -s {endpoint.url}/chat/completions -H 'content-type: application/json' -d '{body}'")
    if KEEP:
        say("stop it all     .venv/bin/fathom down")


def step(number: int, title: str) -> None:
    """A heading with the time since the start."""
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    console.print(f"\n[bold cyan]{number}/{STEPS}[/] [bold]{title}[/] [dim]{minutes}:{seconds:02d}[/]")


def say(line: str) -> None:
    """One line, indented, never cut: it may be copied."""
    console.print(f"    {line}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    try:
        main()
    except FathomError as error:
        console.print(f"[red]error:[/] {error.message}\n  fix: {error.remedy}", markup=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit("stopped")
