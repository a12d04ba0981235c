"""Runs that are killed in the middle of a checkpoint; their processes are forks of one that has all imported."""

import importlib
import json
import multiprocessing
import os
import re
import secrets
import signal
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fathom.errors import StorageError

STEPS, EVERY, CUT_OFF, BEFORE = 5, 2, 4, 2
"""The run's steps, between its checkpoints, the checkpoint that is cut off, and the one before it."""
WARM = [
    "fathom.train.session",
    "fathom.parallel.single",
    "fathom.parallel.fsdp",
    "pandas",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
]
LONGEST_S = 250


class Point(NamedTuple):
    """A moment of the protocol.

    Attributes:
        function: dotted name of what does it.
        on: regular expression that the function's paths, joined, must match; ``R`` stands for the rank.
        when: before it, after it, or inside: of a file, with half of it written under its temporary name; refused:
            nobody dies, the store refuses this call and all others like it.
        nth: which such call it is, in the run's whole life.
    """

    function: str
    on: str
    when: Literal["before", "inside", "after", "refused"]
    nth: int = 1


STAGE, LOCAL = "fathom.train.saving.write_shards", "fathom.storage.local"
PUT, SIZE, WRITE, REMOVE = (f"{LOCAL}.LocalBackend.{name}" for name in ("put", "size", "write", "remove"))
CUT, OLD = f"checkpoints/step-{CUT_OFF:08d}", f"checkpoints/step-{BEFORE:08d}"
TENSORS, INDEX = f"{CUT}/rank-0000R.safetensors$", f"{CUT}/rank-0000R.json$"
EVERY_RANK = {
    "stage": Point(STAGE, f"step-{CUT_OFF:08d}", "before"),
    "staged": Point(STAGE, f"step-{CUT_OFF:08d}", "after"),
    "upload index": Point(PUT, INDEX, "before"),
    "verify index": Point(SIZE, INDEX, "before"),
    "upload tensors": Point(PUT, TENSORS, "before"),
    "half of the tensors": Point(f"{LOCAL}.replacing", TENSORS, "inside"),
    "verify tensors": Point(SIZE, TENSORS, "before"),
    "uploaded": Point(SIZE, TENSORS, "after"),
}
FIRST_RANK = {
    "clear": Point(REMOVE, f"{CUT}$", "before"),
    "manifest": Point(WRITE, f"{CUT}/MANIFEST", "before"),
    "half of the manifest": Point(f"{LOCAL}.replacing", f"{CUT}/MANIFEST", "inside"),
    # The first of these calls belong to the checkpoint before.
    "pointer": Point(WRITE, "LATEST", "before", nth=2),
    "half of the pointer": Point(f"{LOCAL}.replacing", "LATEST", "inside", nth=2),
    "delete": Point(REMOVE, f"{OLD}/MANIFEST", "before", nth=2),
    "delete files": Point(REMOVE, f"{OLD}$", "before", nth=2),
    "deleted": Point(REMOVE, f"{OLD}$", "after", nth=2),
}
REFUSED = Point(PUT, INDEX, "refused")


def arm(point: Point, rank: int) -> None:
    """Have this process killed at this point."""
    owner_name, _, name = point.function.rpartition(".")
    try:
        owner: Any = importlib.import_module(owner_name)
    except ModuleNotFoundError:
        module, _, kind = owner_name.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    genuine = getattr(owner, name)
    on = re.compile(point.on.replace("0000R", f"{rank:05d}"))
    left = point.nth

    def dying(*arguments: Any) -> Any:
        nonlocal left
        left -= on.search(" ".join(str(each) for each in arguments if isinstance(each, str | Path))) is not None
        if left > 0:
            return genuine(*arguments)
        if point.when == "refused":
            left = 1
            raise StorageError("refused", "ask again")
        if point.when == "inside":
            with genuine(*arguments) as file:
                file.write(b"half of it")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        if point.when == "after":
            genuine(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


class Life(NamedTuple):
    """One start of a run.

    Attributes:
        folder: of the whole test: base model, data.
        case: of this run: its storage and its machine's disk.
        world: how many ranks.
        meeting: file by which ranks find each other.
        crash: where to die, and on which rank.
    """

    folder: Path
    case: Path
    world: int
    meeting: Path
    crash: tuple[Point, int] | None


def live(life: Life, rank: int) -> None:
    """A rank's whole life: train to the end, or die on the way. Rank 0 leaves ``started.json`` and the weights."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from fathom.model.collectives import LOCAL as ALONE
    from fathom.model.collectives import ProcessGroup
    from fathom.train.group import Group
    from fathom.train.inputs import fetch_inputs
    from fathom.train.place import Place
    from fathom.train.session import train_worker
    from support.runs import tiny_recipe

    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)}
    shared = life.world > 1
    if shared:
        dist.init_process_group("gloo", init_method=f"file://{life.meeting}", rank=rank, world_size=life.world)
    group = Group(ProcessGroup() if shared else ALONE, rank, life.world, torch.device("cpu"))
    parallel = {"strategy": "fsdp" if shared else "single", "workers": life.world, "threads_per_worker": 1}
    cfg = tiny_recipe(
        life.folder, parallel=parallel, train__steps=STEPS, checkpoint__every_steps=EVERY, checkpoint__keep=1
    )
    work = life.case / "work"
    work.mkdir(parents=True, exist_ok=True)
    inputs = fetch_inputs(cfg, group, life.folder / f"inputs-{life.world}")
    if life.crash is not None and life.crash[1] == rank:
        arm(life.crash[0], rank)
    place = Place(str(life.case / "store"), work, ["parallel"])
    outcome = train_worker(cfg, inputs, place, group, lambda step, metrics: None, lambda step, weights: {})
    if outcome.weights is not None:
        save_file(outcome.weights, life.case / "weights.safetensors")
        (life.case / "started.json").write_text(json.dumps(outcome.started_at))
    # Not through the interpreter's end: there gloo's thread may free the last work's tensors, and the process aborts.
    os._exit(0)


def start(folder: Path, case: Path, world: int, crash: tuple[Point, int] | None = None) -> None:
    """Run all ranks of one start; when one dies the others are killed, as Ray does.

    Raises:
        AssertionError: ranks ended otherwise than they were to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    case.mkdir(parents=True, exist_ok=True)
    life = Life(folder, case, world, case / f"meeting-{secrets.token_hex(4)}", crash)
    ranks = [context.Process(target=live, args=(life, rank)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LONGEST_S
    while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
        assert time.monotonic() < deadline, "ranks hang"
        time.sleep(0.02)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    if crash is None:
        assert codes == [0] * world
    else:
        ended = 1 if crash[0].when == "refused" else -signal.SIGKILL
        assert ended in codes, f"it went on: {codes}"
