"""The effects that every seed of every report showed, on models that train in seconds.

What depends on the seed (whether TaH2 beats Standard, whether 0pt collapses) is for ``fathom claims`` to measure.
"""

from dataclasses import replace

import pytest

from fathom.claims import claim_depth, claim_settling
from fathom.claims.budget import QUICK
from fathom.claims.lab import train_run
from fathom.claims.results import Models

CHAINS = replace(QUICK, longest=4, base_steps=300, steps=120, documents=6, heldout=32)
TEXT = replace(
    QUICK, width=32, window=64, text_base_steps=40, text_steps=20, text_documents=4, base_rate=6e-3, heldout=24
)


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    train_run(CHAINS, CHAINS.base_of(claim_depth.RUN), 1, folder)
    _, scores = train_run(CHAINS, claim_depth.RUN, 1, folder)
    return scores.depth_by_kind, claim_depth.measure(Models(CHAINS, 1, folder))["bins"]


def test_template_tokens_stop_at_once_and_long_chains_go_deeper_than_short_ones(routed):
    depth, _ = routed
    assert depth["template"] < 1.02 and depth["copy"] < 1.02
    assert depth["result 4"] > 1.5
    assert depth["result 4"] > depth["result 2"] + 0.2


def test_another_depth_harms_where_the_decider_says_stop_and_helps_where_it_says_go(routed):
    _, bins = routed
    low, high = ([one for one in bins if one["high"] <= 0.1], [one for one in bins if one["low"] >= 0.8])
    gains = [sum(one["gain"] * one["rows"] for one in part) / sum(one["rows"] for one in part) for part in (low, high)]
    assert gains[0] < -0.5
    assert gains[1] > 0.0


def test_the_state_of_abbie_d_settles_where_that_of_abbie_c_moves_on(tmp_path):
    models, found = Models(TEXT, 1, tmp_path), []
    for run in (claim_settling.D, claim_settling.C):
        train_run(TEXT, run, 1, tmp_path)
        found.append(claim_settling.turns_of(models.load(run), models.documents("text")))
    d, c = found
    assert d[8] < d[4] < d[2]
    assert d[8] < 0.5 * c[8]
