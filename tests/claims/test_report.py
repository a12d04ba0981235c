"""From jobs to the page: what runs, in which order, and that the page shows every seed."""

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fathom.claims.budget import QUICK, Run
from fathom.claims.catalogue import CLAIMS, ONLY_FULL, choose
from fathom.claims.claim_compute import SAME_DATA
from fathom.claims.claim_depth import CLAIM as DEPTH
from fathom.claims.lab import InProcess, Job, needed_runs, plan_jobs, run_claims, run_jobs
from fathom.claims.report import write_report
from fathom.claims.verdict import DOES_NOT_HOLD, HOLDS, UNCLEAR
from fathom.errors import ConfigError

TINY = replace(
    QUICK, seeds=2, width=32, layers=1, base_steps=6, steps=3, documents=2, heldout=4, longest=4, context_tokens=40
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    lines: list[str] = []
    results = run_claims(TINY, [SAME_DATA, DEPTH], tmp_path_factory.mktemp("work"), lines.append, workers=0)
    page, numbers = write_report(results, {"budget": "tiny", "minutes": 0.5}, tmp_path_factory.mktemp("report"))
    return results, page.read_text(), json.loads(numbers.read_text()), lines


class Cells(HTMLParser):
    """The text of all table cells, and every tag that must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "path", "use", "line", "rect"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and "td" in self.open:
            self.cells[-1] += data


def test_the_page_shows_every_seed_of_every_model(report):
    results, page, _, _ = report
    cells = Cells()
    cells.feed(page)
    for name, scores in ((run.name, run) for run in SAME_DATA.runs(TINY)):
        assert cells.cells.count(name) >= TINY.seeds, scores
    for row in results[0].findings.table:
        assert f"{row['NLL']:.4g}" in cells.cells


def test_the_json_has_the_numbers_of_every_seed(report):
    _, _, numbers, _ = report
    first = numbers["claims"][0]
    assert first["verdict"] in (HOLDS, DOES_NOT_HOLD, UNCLEAR)
    assert all(len(question["values"]) == TINY.seeds for question in first["comparisons"])
    assert {row["seed"] for row in first["table"]} == {1, 2}
    difference = first["comparisons"][0]["values"][1]
    nll = {(row["seed"], row["model"]): row["NLL"] for row in first["table"]}
    assert difference == pytest.approx(nll[2, "TaH2 M=2"] - nll[2, "Standard"])


def test_the_page_needs_no_other_file(report):
    _, page, _, _ = report
    addresses = re.findall(r"(?:src|href)=\"([^\"]*)\"|url\(([^)]*)\)", page)
    assert addresses
    assert all((one or other).strip("'\"").startswith("#") for one, other in addresses)
    assert "<script" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two things on one page have the same name"


def test_progress_counts_every_job(report):
    _, _, _, lines = report
    jobs = plan_jobs(TINY, [SAME_DATA, DEPTH], Path("unused"))
    assert len(lines) == len(jobs)
    assert lines[-1].startswith(f"[{len(jobs)}/{len(jobs)}]")


def test_runs_that_claims_share_are_trained_once():
    runs = needed_runs(TINY, [SAME_DATA, DEPTH])
    assert len(runs) == len({run.name for run in runs})
    assert set(DEPTH.runs(TINY)) < set(SAME_DATA.runs(TINY)) < set(runs)


def test_two_runs_of_one_name_are_refused():
    other = replace(DEPTH, runs=lambda budget: [Run("Standard", "tah2", 2)])
    with pytest.raises(ValueError, match="'Standard'"):
        needed_runs(TINY, [SAME_DATA, other])


def test_jobs_wait_for_what_they_need_and_run_no_wider_than_asked():
    order: list[str] = []
    running: set[str] = set()

    class Watching(InProcess):
        def submit(self, fn, /, *args, **kwargs) -> Future:
            running.add(args[0])
            assert len(running) <= 2
            future = super().submit(fn, *args, **kwargs)
            running.discard(args[0])
            return future

    jobs = [
        Job("late", "", frozenset({"dear", "base"}), order.append, ("late",), 1.0),
        Job("dear", "", frozenset({"base"}), order.append, ("dear",), 9.0),
        Job("cheap", "", frozenset({"base"}), order.append, ("cheap",), 2.0),
        Job("base", "", frozenset(), order.append, ("base",), 5.0),
    ]
    done = run_jobs(jobs, Watching(), 2, lambda _: None)
    assert order[0] == "base" and order.index("dear") < order.index("cheap")
    assert order.index("late") > order.index("dear")
    assert set(done) == {"late", "dear", "cheap", "base"}


def test_a_job_that_nobody_can_start_is_named():
    with pytest.raises(ValueError, match="'lost' needs \\['nobody'\\]"):
        run_jobs([Job("lost", "", frozenset({"nobody"}), print, (), 1.0)], InProcess(), 1, lambda _: None)


def test_claims_are_chosen_by_name():
    assert [claim.key for claim in choose(["depth", "same-data"], quick=True)] == ["same-data", "depth"]
    with pytest.raises(ConfigError, match="did you mean 'depth'"):
        choose(["dept"], quick=True)
    assert {claim.key for claim in choose([], quick=False)} == {claim.key for claim in CLAIMS}
    left_out = {claim.key for claim in CLAIMS} - {claim.key for claim in choose([], quick=True)}
    assert left_out == ONLY_FULL


def test_every_claim_has_its_own_key_and_names_models_that_exist():
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)
    for run in needed_runs(QUICK, CLAIMS):
        model = QUICK.model(run)
        assert model.config.layers == QUICK.layers_of(run)
