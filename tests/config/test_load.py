"""Recipes: merging, overrides, numbers as people write them, and one clear message for every mistake."""

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.config.load import changed_keys, config_dict, config_digest, load_recipe, parse_config
from fathom.config.yaml12 import read_yaml
from fathom.errors import ConfigError

RECIPE = """
name: demo
model: {base: some/folder}
data: {train: rows.jsonl}
train: {steps: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(RECIPE)
    return path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def test_defaults_are_resolved_and_survive_a_round_trip(recipe: Path) -> None:
    cfg = load_recipe(recipe)
    tree = config_dict(cfg)
    assert tree["optimizer"]["clip_norm"] == 1.0, "training.md D.2 #3: the clip value is named in the resolved config"
    assert parse_config(tree) == cfg
    assert config_digest(parse_config(tree)) == config_digest(cfg)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "+1e-4", "1_0e-5"])
def test_scientific_notation_is_a_number(recipe: Path, text: str) -> None:
    assert load_recipe(recipe, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", "no"), ("on", "on"), ("2024-01-01", "2024-01-01"), ("010", 10.0), ("1:30", "1:30"), ("5_000",
    5000),
     ("true", True), ("~", None), ("", None), ("0x10", "0x10"), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("'7'",
     "7"), ("1e5x", "1e5x"), ("-.inf", float("-inf"))],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read, _ = read_yaml(f"key: {text}", "here")
    assert read["key"] == value and type(read["key"]) is type(value)


def test_base_is_relative_to_the_recipe_and_merged_deeply(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "base.yaml", RECIPE + "optimizer: {learning_rate: 1e-3, beta2: 0.95}\n")
    child = write(tmp_path / "sub", "child.yaml", "base: ../base.yaml\nname: child\noptimizer: {beta2: 0.99}\n")
    cfg = load_recipe(child, ["optimizer.beta2=0.9", "optimizer.beta2=0.8"])
    assert (cfg.name, cfg.optimizer.learning_rate, cfg.optimizer.beta2) == ("child", 1e-3, 0.8)


def test_base_of_a_base_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", RECIPE)
    write(tmp_path, "b.yaml", "base: a.yaml\n")
    child = write(tmp_path, "c.yaml", "base: b.yaml\n")
    with pytest.raises(ConfigError, match="has a base itself"):
        load_recipe(child)


@pytest.mark.parametrize(
    ("override", "said", "remedy"),
    [
        ("optimizer.learning_rat=1", "unknown key 'optimizer.learning_rat'", "optimizer.learning_rate"),
        ("learning_rate=1", "unknown key 'learning_rate'", "optimizer.learning_rate"),
        ("optimiser.beta1=0.9", "unknown key 'optimiser'", "optimizer"),
        ("schedule.kind=cosin", 'schedule.kind is "cosin"', "did you mean cosine?"),
        ("parallel.strategy=deepspeed", "parallel.strategy", "single, fsdp, zero"),
        ("train.steps=ten", 'train.steps is "ten"', "correct train.steps"),
        ("train.steps=0", "train.steps is 0: should be greater than or equal to 1", "correct train.steps"),
        ("train.steps=1.5", "train.steps is 1.5", "correct train.steps"),
        ("optimizer.epsilon=.nan", "optimizer.epsilon", "correct"),
        ("train=5", "train is 5: should be a section", "correct train"),
        ("train.steps", "not section.key=value", "--set"),
        (".steps=1", "not section.key=value", "--set"),
        ("seed.more=1", 'seed is {"more": 1}: should be a valid integer', "correct seed"),
        ("parallel.workers=2", "runs on one worker", ""),
        ("data.context_tokens=99999", "one conversation must fit", ""),
        ("objective.value_head=0.5", "gains of rows that are not looked ahead", ""),
        ("train.steps=[", "not valid YAML", "syntax"),
    ],
)
def test_a_mistake_gives_its_place_and_the_nearest_name(recipe: Path, override: str, said: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    assert said in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == 2
    assert "pydantic" not in str(caught.value)


def test_a_scalar_is_not_a_section(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", RECIPE + "seed: 3\n")
    with pytest.raises(ConfigError, match="'seed' is not a section"):
        load_recipe(path, ["seed.more=1"])


def test_the_line_of_a_wrong_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", RECIPE + "checkpoint:\n  keep: 2\n  evry_steps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert f"{path}:8: unknown key 'checkpoint.evry_steps'" in caught.value.message
    assert "checkpoint.every_steps" in caught.value.remedy


def test_all_mistakes_are_reported_at_once(recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, ["train.stepz=1", "data.trains=x"])
    assert "train.stepz" in caught.value.message and "data.trains" in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nname: y\n", "'name' is set twice"),
        ("- 1\n- 2\n", "not a mapping"),
        ("", "not a mapping"),
        ("name: [", "not valid YAML"),
        ("name: x\n", "'model' is missing"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("base: [a, b]\n", "path of one recipe"),
        ("base: nowhere.yaml\n", "cannot read recipe"),
    ],
)
def test_a_broken_recipe_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert said in caught.value.message


def test_a_missing_or_binary_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_recipe(tmp_path / "bin.yaml")


def test_digest_moves_with_every_key(recipe: Path) -> None:
    plain = load_recipe(recipe)
    moved = load_recipe(recipe, ["checkpoint.keep=7"])
    assert config_digest(plain) != config_digest(moved)
    assert changed_keys(config_dict(plain), config_dict(moved)) == ["checkpoint.keep"]


def test_changed_keys_sees_added_and_removed_ones() -> None:
    assert changed_keys({"a": {"b": 1}, "c": None}, {"a": {"b": 1, "d": 2}}) == ["a.d", "c"]


@given(st.dictionaries(st.sampled_from("abc"), st.integers() | st.dictionaries(st.sampled_from("xy"), st.none())))
def test_a_tree_differs_from_itself_nowhere(tree: dict[str, object]) -> None:
    assert changed_keys(tree, tree) == []
