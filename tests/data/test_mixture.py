"""Mixtures: shares are met, every source runs through its own epochs, and a step is a pure function of its number."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.config.load import load_recipe
from fathom.data import mixture
from fathom.data.mixture import epoch_draws, mixed_examples
from fathom.data.prepared import Prepared
from fathom.data.sampler import epoch_order, step_examples
from fathom.errors import ConfigError, DataError
from fathom.train.group import own_process
from fathom.train.inputs import fetch_inputs
from fathom.train.plan import plan_step
from support.runs import tiny_recipe, write_questions

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Sizes and weights of which every source gets a draw."""
    sizes = draw(SIZES)
    least = 2 * len(sizes) / sum(sizes)
    if least > 1:
        return sizes, [1.0] * len(sizes)
    return sizes, [draw(st.floats(max(least, 0.2), 1.0)) for _ in sizes]


def slow_reference(seed: int, sizes: list[int], draws: list[int], count: int) -> list[int]:
    """The first draws of a mixture, one after the other with a counter for each source."""
    taken = [0] * len(sizes)
    line: list[int] = []
    for cursor in range(count):
        epoch, place = divmod(cursor, sum(draws))
        slot = int(epoch_order(~seed, sum(draws), epoch)[place])
        source = next(number for number in range(len(draws)) if slot < sum(draws[: number + 1]))
        own_epoch, own_place = divmod(taken[source], sizes[source])
        order = epoch_order(seed + source, sizes[source], own_epoch)
        line.append(sum(sizes[:source]) + int(order[own_place]))
        taken[source] += 1
    return line


@given(mixtures(), st.integers(0, 2**40), st.integers(1, 25), st.integers(0, 6))
def test_a_step_is_that_part_of_one_endless_line(
    of: tuple[list[int], list[float]], seed: int, per_step: int, step: int
) -> None:
    sizes, weights = of
    line = slow_reference(seed, sizes, epoch_draws(sizes, weights), (step + 1) * per_step)
    assert mixed_examples(seed, sizes, weights, per_step, step) == line[step * per_step :]


@given(mixtures(), st.integers(1, 3))
def test_shares_are_met_and_no_example_of_a_source_comes_twice_before_all_have_come(
    of: tuple[list[int], list[float]], epochs: int
) -> None:
    sizes, weights = of
    total = sum(sizes)
    line = [example for step in range(epochs) for example in mixed_examples(3, sizes, weights, total, step)]
    start = 0
    for size, weight in zip(sizes, weights, strict=True):
        seen = Counter(example for example in line if start <= example < start + size)
        assert abs(seen.total() / epochs - total * weight / sum(weights)) < 1.0
        assert max(seen.values()) - min(seen[example] for example in range(start, start + size)) <= 1
        start += size


@given(SIZES)
def test_weights_like_the_sizes_give_every_example_once_per_epoch(sizes: list[int]) -> None:
    assert epoch_draws(sizes, sizes) == sizes
    assert sorted(mixed_examples(1, sizes, sizes, sum(sizes), 2)) == list(range(sum(sizes)))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9))
def test_one_source_is_drawn_as_without_a_mixture(size: int, per_step: int, step: int) -> None:
    assert mixed_examples(5, [size], [0.3], per_step, step) == step_examples(5, size, per_step, step)


def test_the_order_is_fixed_for_ever() -> None:
    """A run resumed after an upgrade must see the same data: these numbers may never change."""
    assert mixed_examples(42, [3, 7], [3.0, 1.0], 10, 0) == [2, 1, 0, 8, 1, 2, 0, 9, 1, 0]


def test_a_source_that_would_never_come_is_refused() -> None:
    with pytest.raises(DataError, match="source 2 is never drawn: its share of 10 draws is less than one"):
        epoch_draws([9, 1], [1000.0, 1.0])


def mixed_run(folder: Path) -> tuple:
    """A recipe of two files, twice as much of the smaller one; its prepared data."""
    plain = tiny_recipe(folder)
    write_questions(folder / "small.jsonl", range(20, 24))
    both = [{"source": str(folder / "train.jsonl"), "weight": 1}, {"source": str(folder / "small.jsonl"), "weight": 2}]
    cfg = tiny_recipe(folder, data__train=both, train__examples_per_step=5)
    assert cfg.seed == plain.seed
    (folder / "work").mkdir()
    return cfg, fetch_inputs(cfg, own_process(), folder / "work").train


def test_a_recipe_of_two_sources_trains_on_both_on_any_number_of_workers(tmp_path: Path) -> None:
    cfg, data = mixed_run(tmp_path)
    assert isinstance(data, Prepared)
    assert (data.sizes, [each["documents"] for each in data.counts["sources"]]) == ([8, 4], [8, 4])
    assert data.where(8) == f"{tmp_path / 'small.jsonl'}:1"
    steps = []
    for step in range(12):
        mixture._epoch_turns.cache_clear()  # a process that begins here
        shared = []
        for world in (1, 2, 3):
            plans = [plan_step(cfg, data, step, rank, world) for rank in range(world)]
            shared.append(sorted(number for plan in plans for batch in plan.micro_batches for number in batch))
        assert shared[0] == shared[1] == shared[2]
        steps += shared[0]
    assert len(steps) == 60
    assert sum(number >= 8 for number in steps) == 40, "five epochs of 12 draws, 8 of them of the smaller file"


def test_mistakes_in_a_list_of_sources_are_named(tmp_path: Path) -> None:
    cfg, _ = mixed_run(tmp_path)
    assert cfg.data.train_sources == [str(tmp_path / "train.jsonl"), str(tmp_path / "small.jsonl")]
    recipe = tmp_path / "r.yaml"
    head = "name: x\nmodel: {base: b}\ntrain: {steps: 1}\ndata:\n  train:"
    for text, said in [
        ("\n  - source: a\n    share: 1", "unknown key 'data.train.0.share'"),
        ("\n  - {source: a, weight: 1}\n  - {source: b, weight: 0}", "data.train.1.weight is 0: should be greater"),
        (" 3", "data.train is 3: should be a list"),
        (" []", "data.train names no source"),
    ]:
        recipe.write_text(head + text + "\n")
        with pytest.raises(ConfigError) as caught:
            load_recipe(recipe)
        assert said in caught.value.message
    assert load_recipe(recipe, ["data.train=[{source: a, weight: 2}]"]).data.train_sources == ["a"]
