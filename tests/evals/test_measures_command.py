"""``fathom eval --measures`` and ``--accuracy`` on a tiny model folder: files, lines, tracking, and mistakes."""

import json
from pathlib import Path

import pytest
import torch

from fathom.cli.measures import MEASURES
from fathom.config.schema import MethodConfig
from fathom.model.folder import load_model, save_model
from support.command import fathom, write_eval_recipe
from support.models import tiny_base_folder

QUIET = ["heldout", "changes", "calibration", "kinds", "convergence", "attention", "thresholds"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, a converted one whose decider is loud, a task, and the recipe that names the base."""
    folder = tmp_path_factory.mktemp("measures")
    base = tiny_base_folder(folder / "base", max_position_embeddings=1024)
    model = load_model(base, MethodConfig(preset="tah2", max_depth=2), seed=1)
    with torch.no_grad():
        model.decider.score.weight.mul_(200)
    save_model(model, folder / "tiny", base)
    write_eval_recipe(folder, base, heldout=2)
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(3)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def files_of(name: str) -> set[str]:
    stems = {"heldout": "depths"}
    return {f"{name}.json", f"{stems.get(name, name)}.svg", f"{stems.get(name, name)}.png"}


def strict(text: str) -> dict:
    """JSON without NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_all_measures_leave_json_and_plots(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "all"
    recipe = place / "tiny.yaml"
    code, text, log = fathom(
        capsys, "eval", recipe, "--model", place / "tiny", "--measures", "all", "--out", out, "--thresholds", "0.3,0.7"
    )
    assert code == 0, log
    assert {path.name for path in out.iterdir()} == set().union(*map(files_of, QUIET))
    results = {name: strict((out / f"{name}.json").read_text()) for name in QUIET}
    assert results["calibration"]["gains"] == "lookahead"
    assert results["changes"]["whole"]["rows"] == results["heldout"]["supervised_tokens"]
    assert results["kinds"]["tokens"] == results["heldout"]["supervised_tokens"]
    assert results["kinds"]["mean_depth"] == pytest.approx(results["heldout"]["mean_depth"])
    assert {point["setting"] for point in results["thresholds"]["points"]} == {0.3, 0.7}
    assert len(results["convergence"]["iterations"]) == 2 and results["attention"]["documents"] == 2
    for line in ("held-out NLL", "depth 1 to 2, all forced", "gain of one more depth", "depth by kind", "slope"):
        assert line in text


def test_accuracy_generates_samples_and_grades_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "graded"
    options = ["--accuracy", "--samples", 3, "--temperature", 1, "--max-tokens", 6, "--cutoffs", "2,4,6"]
    where = ["--model", place / "tiny", "--task", place / "task.jsonl", "--out", out]
    code, text, log = fathom(capsys, "eval", place / "tiny.yaml", *where, *options, "--json")
    assert code == 0, log
    found = strict(text)
    assert set(found) == {"accuracy", "accuracy-curve"}
    accuracy = found["accuracy"]
    assert (accuracy["items"], accuracy["samples"], accuracy["tokens_per_answer"] <= 6) == (2, 3, True)
    assert [entry["where"] for entry in accuracy["answered"]] == [f"{place / 'task.jsonl'}:{line}" for line in (1, 2)]
    assert all(len(entry["right"]) == 3 for entry in accuracy["answered"])
    assert {point["setting"] for point in found["accuracy-curve"]["points"]} == {2, 4, 6}
    assert {path.name for path in out.iterdir()} == files_of("accuracy") | files_of("accuracy-curve")
    _, table, _ = fathom(capsys, "eval", place / "tiny.yaml", *where, *options)
    assert "avg@3" in table and "cons@3" in table and "decode FLOPs" in table


def test_accuracy_by_threshold_generates_for_each(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--model", place / "tiny", "--task", place / "task.jsonl", "--max-tokens", 4]
    options = ["--measures", "accuracy-thresholds", "--thresholds", "0,1"]
    code, text, log = fathom(capsys, "eval", place / "tiny.yaml", *where, *options, "--json")
    assert code == 0, log
    [deep, shallow] = sorted(strict(text)["accuracy-thresholds"]["points"], key=lambda point: point["setting"])
    assert deep["flops"] > 1.5 * shallow["flops"], "at threshold 0 every token runs both depths"
    code, _, log = fathom(capsys, "eval", place / "tiny.yaml", *options)
    assert code == 2 and "no threshold to move" in log


def test_measures_of_depth_are_left_out_for_a_base_model_unless_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, log = fathom(capsys, "eval", place / "tiny.yaml", "--measures", "all", "--json")
    assert code == 0 and set(strict(text)) == {"heldout", "kinds", "attention"}
    assert "changes: left out: " in log and "thresholds: left out: method 'standard'" in log
    code, _, log = fathom(capsys, "eval", place / "tiny.yaml", "--measures", "changes")
    assert code == 2 and "'standard' has one" in log and "Traceback" not in log


class Kept:
    """A tracker that keeps what it is told."""

    made: "list[Kept]"

    def __init__(self, spool: Path, uri: str, experiment: str, run_name: str, tags: dict[str, str]) -> None:
        self.about = (uri, experiment, run_name, tags)
        self.files: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self.status = ""
        self.url = "http://tracker/run"
        Kept.made.append(self)

    def start(self, config: dict, digests: dict[str, str]) -> None:
        assert config["name"] == "tiny" and digests["config"]

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.values |= values

    def artifact(self, path: Path, folder: str) -> None:
        self.files[f"{folder}/{path.name}"] = path.stat().st_size

    def finish(self) -> bool:
        return True


def test_results_are_artifacts_where_there_is_a_server(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Kept.made = []
    monkeypatch.setattr("fathom.tracking.tracker.Tracker", Kept)
    server = ["--set", "tracking.uri=http://tracker", "--set", "tracking.experiment=lab"]
    out = place / "kept"
    (out / "older").mkdir(parents=True)
    code, _, log = fathom(capsys, "eval", place / "tiny.yaml", *server, "--measures", "heldout,kinds", "--out", out)
    assert code == 0 and "tracked: http://tracker/run" in log
    [run] = Kept.made
    uri, experiment, name, tags = run.about
    assert (uri, experiment, name, tags["measures"]) == ("http://tracker", "lab", "tiny-eval", "heldout,kinds")
    assert set(run.files) == {f"evals/{file}" for file in files_of("heldout") | files_of("kinds")}
    assert all(run.files.values()) and run.values["heldout/mean_depth"] == 1.0
    _, _, log = fathom(capsys, "eval", place / "tiny.yaml", *server)
    assert len(Kept.made) == 1 and not log, "the held-out table alone is not a run"
    fathom(capsys, "eval", place / "tiny.yaml", *server, "--measures", "kinds")
    assert set(Kept.made[1].files) == {f"evals/{file}" for file in files_of("kinds")}, "also without --out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measures", "calibraton"], "did you mean 'calibration'?"),
        (["--measures", ","], "names none"),
        (["--samples", "4"], "add --accuracy"),
        (["--task", "x.jsonl"], "add --accuracy"),
        (["--accuracy", "--samples", "4"], "give --temperature above 0"),
        (["--accuracy", "--cutoffs", "2,x"], "not a list of numbers"),
        (["--accuracy", "--cutoffs", ""], "a curve needs two points"),
        (["--accuracy", "--cutoffs", "8,300"], "300 is not within 1 to 256"),
        (["--accuracy", "--max-tokens", "1"], "no two cutoffs"),
        (["--accuracy", "--match", "fuzzy"], "--match 'fuzzy' is unknown"),
        (["--accuracy", "--task", "nowhere.jsonl"], "--task: "),
        (["--accuracy", "--max-tokens", "1020", "--max-examples", "1"], "more than the 1024"),
        (["--thresholds", "0.1,0.2"], "add --measures thresholds"),
        (["--measures", "thresholds", "--thresholds", "0.1,1.2"], "1.2 is not within 0 to 1"),
        (["--measures", "thresholds", "--thresholds", "0.1,nan"], "nan is not within 0 to 1"),
    ],
)
def test_mistakes_are_said(place: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    code, text, log = fathom(capsys, "eval", place / "tiny.yaml", *options)
    assert (code, text) == (2, "") and message in log and "Traceback" not in log


def test_a_file_is_no_place_for_results(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, log = fathom(capsys, "eval", place / "tiny.yaml", "--measures", "all", "--out", place / "tiny.yaml")
    assert code == 2 and "is a file" in log


def test_every_measure_is_in_the_help() -> None:
    from fathom.cli.evaluate import MEASURE_HELP

    assert all(name in MEASURE_HELP for name in MEASURES)
