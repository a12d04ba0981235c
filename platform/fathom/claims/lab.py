"""Runs what the chosen claims need: bases first, then what is trained from them, every seed, on all cores.

A job is a training run of one seed, or a claim's own measurement of one seed's models. Jobs that claims share run once.
"""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fathom.claims.budget import Budget, Run
from fathom.claims.measure import Scores, score
from fathom.claims.results import Claim, ClaimResult, Measure, Models, Results, judge
from fathom.claims.train import Fit, fit
from fathom.errors import FathomError

GPU_WORKERS = 4
"""Tiny models leave a GPU idle between kernels; more processes than this wait for each other."""

Say = Callable[[str], None]


class Job(NamedTuple):
    """Something for a worker.

    Attributes:
        name: unique.
        words: for progress.
        needs: names of jobs that come before.
        function: top-level, called with ``arguments``.
        cost: relative; dear jobs start first.
    """

    name: str
    words: str
    needs: frozenset[str]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cost: float


def train_run(budget: Budget, run: Run, seed: int, folder: Path) -> tuple[Fit, Scores]:
    """Train, keep and score one run of one seed.

    Raises:
        FathomError: it diverged.
    """
    models = Models(budget, seed, folder)
    model, task = models.new(run), budget.tasks[run.task]
    reference = models.load(run.labels_of) if run.labels_of is not None else None
    try:
        fitted = fit(model, task, budget.plan(run), seed, budget.objective(run), reference)
    except FloatingPointError as error:
        raise FathomError(f"{run.name}, seed {seed}: {error}", "lower the learning rates of the budget") from error
    scores = score(model, task, models.documents(run.task))
    models.save(run, model, scores)
    return fitted, scores


def measure_claim(measure: Measure, budget: Budget, seed: int, folder: Path) -> dict[str, Any]:
    """A claim's own measurement of one seed."""
    return measure(Models(budget, seed, folder))


def needed_runs(budget: Budget, claims: Iterable[Claim]) -> list[Run]:
    """Every run that the claims need, each once, and the runs that these need.

    Raises:
        ValueError: two different runs of one name.
    """
    found: dict[str, Run] = {}

    def add(run: Run) -> None:
        for before in budget.needs(run):
            add(before)
        if found.setdefault(run.name, run) != run:
            raise ValueError(f"two claims mean different runs by {run.name!r}")

    for claim in claims:
        for run in claim.runs(budget):
            add(run)
    return list(found.values())


def plan_jobs(budget: Budget, claims: list[Claim], folder: Path) -> list[Job]:
    """All jobs of a report."""
    jobs = []
    for seed in range(1, budget.seeds + 1):
        for run in needed_runs(budget, claims):
            needs = frozenset(_name(before.name, seed) for before in budget.needs(run))
            steps = budget.plan(run).steps
            cost = steps * budget.layers_of(run) * (1.0 + 0.8 * (run.max_depth - 1))
            words = f"{run.name}, seed {seed}"
            jobs.append(Job(_name(run.name, seed), words, needs, train_run, (budget, run, seed, folder), cost))
        for claim in claims:
            if claim.measure is not None:
                needs = frozenset(_name(run.name, seed) for run in claim.runs(budget))
                words = f"measuring {claim.key}, seed {seed}"
                arguments = (claim.measure, budget, seed, folder)
                jobs.append(Job(_measure_name(claim, seed), words, needs, measure_claim, arguments, 1.0))
    return list({job.name: job for job in jobs}.values())


def run_jobs(jobs: list[Job], executor: Executor, workers: int, say: Say) -> dict[str, Any]:
    """Results by job name. Bases start first, so that something is always ready; then the dearest."""
    waiting = sorted(jobs, key=lambda job: (bool(job.needs), -job.cost))
    running: dict[Future[Any], Job] = {}
    done: dict[str, Any] = {}
    started = time.perf_counter()
    while waiting or running:
        for job in [job for job in waiting if job.needs <= done.keys()][: workers - len(running)]:
            waiting.remove(job)
            running[executor.submit(job.function, *job.arguments)] = job
        if not running:
            raise ValueError(
                f"job {waiting[0].name!r} needs {sorted(waiting[0].needs - done.keys())}, which nobody does"
            )
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            done[job.name] = future.result()
            elapsed = time.perf_counter() - started
            say(f"[{len(done)}/{len(jobs)}] {elapsed:5.0f} s  {job.words}{_outcome(done[job.name])}")
    return done


def run_claims(
    budget: Budget, claims: list[Claim], folder: Path, say: Say, workers: int | None = None
) -> list[ClaimResult]:
    """Train, measure and judge.

    Args:
        folder: for weights, emptied by the caller afterwards.
        say: receives a line of progress at a time.
        workers: processes; None for one per core (a few on a GPU), 0 to run everything in this process.
    """
    if workers is None:
        workers = cores() if budget.device == "cpu" else min(cores(), GPU_WORKERS)
    jobs = plan_jobs(budget, claims, folder)
    with _workers(workers) as executor:
        try:
            done = run_jobs(jobs, executor, max(workers, 1), say)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return [judge(claim, _results(budget, claim, done)) for claim in claims]


def _workers(count: int) -> Executor:
    """Processes of one thread each: tiny matrices are not worth sharing out, and times then compare."""
    if not count:
        return InProcess()
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


class InProcess(Executor):
    """Runs jobs where they are submitted, for tests and debuggers."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _results(budget: Budget, claim: Claim, done: dict[str, Any]) -> Results:
    seeds = list(range(1, budget.seeds + 1))
    trained = {run.name: [done[_name(run.name, seed)] for seed in seeds] for run in claim.runs(budget)}
    return Results(
        budget,
        seeds,
        scores={name: [scores for _, scores in all_seeds] for name, all_seeds in trained.items()},
        fits={name: [fitted for fitted, _ in all_seeds] for name, all_seeds in trained.items()},
        measured=[done[_measure_name(claim, seed)] for seed in seeds] if claim.measure is not None else [],
    )


def _name(what: str, seed: int) -> str:
    return f"{what}#{seed}"


def _measure_name(claim: Claim, seed: int) -> str:
    """Claims of one module share a measurement."""
    return _name(f"{getattr(claim.measure, '__module__', '')}.{getattr(claim.measure, '__qualname__', '')}", seed)


def _outcome(result: Any) -> str:
    if not isinstance(result, tuple):
        return ""
    fitted, scores = result
    return f": NLL {scores.nll:.4f}, depth {scores.mean_depth:.2f}, trained in {fitted.seconds:.0f} s"
