"""Tokens per parameter become steps; a resumed run keeps its number."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.checkpoint.store import CheckpointStore
from fathom.config.load import config_dict
from fathom.data.prepared import Prepared
from fathom.errors import ConfigError
from fathom.model.folder import load_model
from fathom.storage import files
from fathom.train.group import own_process
from fathom.train.inputs import Inputs, fetch_inputs
from fathom.train.length import count_parameters, run_length
from fathom.train.place import CHECKPOINTS, Place
from fathom.train.plan import drawn_examples, mean_tokens
from fathom.train.session import train_worker
from support.runs import tiny_recipe


class Documents:
    """Lengths are all that a run's length follows from, and which source they are of."""

    lengths = np.array([10, 20, 60])
    sizes = (2, 1)


def inputs_of(folder: Path) -> Inputs:
    documents: Prepared = Documents()  # pyright: ignore[reportAssignmentType]
    return Inputs(folder / "base", documents, None)


@pytest.mark.parametrize("preset", ["standard", "tah2"])
@pytest.mark.parametrize("asked", [0.001, 0.3, 20.0])
def test_steps_hold_so_many_tokens_per_parameter(tmp_path: Path, preset: str, asked: float) -> None:
    """The fewest steps of 4 documents (of 30 tokens, on average) that hold them."""
    changes = {"method__preset": preset, "method__max_depth": None, "train__steps": None}
    cfg = tiny_recipe(tmp_path, train__tokens_per_parameter=asked, train__examples_per_step=4, **changes)
    parameters = sum(value.numel() for value in load_model(tmp_path / "base", cfg.method).parameters())
    steps = run_length(cfg, inputs_of(tmp_path))
    wanted = asked * parameters
    assert steps >= 1 and steps * 4 * 30 >= wanted
    assert steps == 1 or (steps - 1) * 4 * 30 < wanted


def test_added_parts_are_parameters_and_tied_ones_count_once(tmp_path: Path) -> None:
    lengths = {}
    for preset in ("standard", "tah2"):
        changes = {"method__preset": preset, "method__max_depth": None, "train__steps": None}
        cfg = tiny_recipe(tmp_path, train__tokens_per_parameter=3.0, train__examples_per_step=1, **changes)
        lengths[preset] = run_length(cfg, inputs_of(tmp_path))
    d, ffn, vocab = 32, 48, load_model(tmp_path / "base").config.vocab_size
    base = vocab * d + 2 * (2 * d * d + 2 * d * 16 + 3 * d * ffn + 2 * d) + d
    added = (2 * d * d + 3 * d * d + 4 * d) + (3 * d * d + 3 * d * d + 5 * d)
    assert lengths == {"standard": math.ceil(base / 10), "tah2": math.ceil((base + added) / 10)}


def test_of_a_mixture_the_mean_is_that_of_the_draws(tmp_path: Path) -> None:
    """Two draws of three from the source of 60: (2 * 60 + 15) / 3 tokens a conversation, exactly so over an epoch."""
    sources = [{"source": str(tmp_path / "train.jsonl"), "weight": weight} for weight in (1.0, 2.0)]
    cfg = tiny_recipe(
        tmp_path, data__train=sources, train__steps=None, train__tokens_per_parameter=3.0, train__examples_per_step=3
    )
    inputs = inputs_of(tmp_path)
    drawn = [inputs.train.lengths[drawn_examples(cfg, inputs.train, step)].sum() for step in range(2)]
    assert sum(drawn) / 6 == mean_tokens(cfg, inputs.train) == 45.0
    steps, parameters = run_length(cfg, inputs), count_parameters(cfg, inputs)
    assert (steps - 1) * 3 * 45 < 3.0 * parameters <= steps * 3 * 45


def test_a_resumed_run_keeps_its_number_unless_another_length_is_asked_for(tmp_path: Path) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=None, train__tokens_per_parameter=3.0)
    earlier = {"config": config_dict(cfg), "progressed": {"total": 7}}
    assert run_length(cfg, inputs_of(tmp_path), earlier) == 7 != run_length(cfg, inputs_of(tmp_path))
    for changes in ({"tokens_per_parameter": 4.0}, {"examples_per_step": 5}):
        other = cfg.model_copy(update={"train": cfg.train.model_copy(update=changes)})
        assert run_length(other, inputs_of(tmp_path), earlier) == run_length(other, inputs_of(tmp_path)) != 7
    assert run_length(tiny_recipe(tmp_path, train__steps=5), inputs_of(tmp_path), earlier) == 5


def test_a_run_stops_at_its_number_and_its_checkpoint_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"method__preset": "standard", "method__max_depth": None, "data__heldout": None, "train__steps": None}
    cfg = tiny_recipe(tmp_path, train__tokens_per_parameter=0.01, **changes)
    place = Place(str(tmp_path / "store" / "runs" / "tiny"), tmp_path / "work", [])
    place.work.mkdir()
    group = own_process()._replace(device=torch.device("cpu"))
    inputs = fetch_inputs(cfg, group, place.work)
    steps = run_length(cfg, inputs)
    assert 1 < steps < 6
    done = train_worker(cfg, inputs, place, group, lambda step, metrics: None, lambda step, weights: {})
    latest = CheckpointStore(files.join(place.uri, CHECKPOINTS)).latest()
    assert done.finished and done.state.step == steps
    assert latest is not None and latest.meta["progressed"]["total"] == steps
    assert f"0.01 tokens per parameter: {steps} steps" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"train__steps": None}, {"train__tokens_per_parameter": 20.0}])
def test_a_recipe_says_its_length_once(tmp_path: Path, changes: dict[str, float | None]) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps and train\.tokens_per_parameter both say how long"):
        tiny_recipe(tmp_path, **changes)
