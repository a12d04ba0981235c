"""A run killed at any point of making a checkpoint goes on from the newest complete one, and leaves nothing behind."""

import json
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fathom.checkpoint.store import CheckpointStore
from fathom.storage.manifest import MANIFEST
from support.crashes import BEFORE, CUT_OFF, EVERY_RANK, FIRST_RANK, REFUSED, STEPS, start
from support.runs import tiny_recipe

pytestmark = pytest.mark.timeout(600)
POINTS = EVERY_RANK | FIRST_RANK
COMMITTED = {"pointer", "half of the pointer", "delete", "delete files", "deleted"}
"""Points after the manifest: the checkpoint that was cut off is complete."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base model and data of every run here."""
    place = tmp_path_factory.mktemp("crashes")
    tiny_recipe(place)
    return place


def undisturbed(folder: Path, world: int) -> Path:
    """Of a run that nobody kills, made once."""
    case = folder / f"whole-{world}"
    if not case.exists():
        start(folder, case, world)
    return case


def goes_on(folder: Path, world: int, name: str, rank: int) -> None:
    """Kill a rank at a point, start again, and compare."""
    case = Path(tempfile.mkdtemp(dir=folder))
    store = CheckpointStore(str(case / "store" / "checkpoints"))
    start(folder, case, world, (POINTS[name], rank))
    newest = store.latest()
    assert newest is not None
    assert newest.step == (CUT_OFF if name in COMMITTED else BEFORE)
    start(folder, case, world)
    assert json.loads((case / "started.json").read_text()) == newest.step
    compare(folder, case, world)


def compare(folder: Path, case: Path, world: int) -> None:
    """A case that is over, with the undisturbed run: the same parameters, and nothing left beside the last step."""
    store = CheckpointStore(str(case / "store" / "checkpoints"))
    ours = load_file(case / "weights.safetensors")
    theirs = load_file(undisturbed(folder, world) / "weights.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)
    left = sorted(path.name for path in (case / "store" / "checkpoints").iterdir())
    assert left == ["IDENTITY", "LATEST", f"step-{STEPS:08d}"]
    complete = store.latest()
    assert complete is not None
    assert {path.name for path in Path(complete.uri).iterdir()} == {*complete.files, MANIFEST}
    assert list(case.glob("work/staging/*")) == []


@pytest.mark.parametrize("name", ["half of the tensors", "manifest", "delete files"])
def test_one_process_killed_at_a_point(folder: Path, name: str) -> None:
    goes_on(folder, 1, name, 0)


def test_a_second_rank_killed_at_a_point(folder: Path) -> None:
    goes_on(folder, 2, "verify tensors", 1)


def test_a_store_that_refuses_one_ranks_part_leaves_the_newest_state_of_both_to_the_next_start(folder: Path) -> None:
    case = folder / "refused"
    store = CheckpointStore(str(case / "store" / "checkpoints"))
    start(folder, case, 2, (REFUSED, 1))
    assert store.steps() == [CUT_OFF, BEFORE] and store.latest().step == BEFORE
    kept = sorted(path.parent.name for path in (case / "work" / "staging").glob(f"*/{MANIFEST}"))
    assert kept == [f"step-{STEPS:08d}-rank-{rank:05d}" for rank in (0, 1)]
    start(folder, case, 1)  # a checkpoint is read, and so stored, by any number of workers
    assert json.loads((case / "started.json").read_text()) == STEPS
    compare(folder, case, 2)


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY_RANK)
@pytest.mark.parametrize("rank", [0, 1])
def test_either_rank_killed_at_every_point_of_its_own(folder: Path, name: str, rank: int) -> None:
    goes_on(folder, 2, name, rank)


@pytest.mark.full
@pytest.mark.parametrize("name", FIRST_RANK)
def test_the_first_rank_killed_at_every_point_of_the_commit(folder: Path, name: str) -> None:
    goes_on(folder, 2, name, 0)
