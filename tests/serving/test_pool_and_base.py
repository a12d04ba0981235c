"""Page books under random histories; and at one depth the engine is transformers' greedy generation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.model.folder import load_model
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Progress, Request, Sampling
from fathom_serve.engine.sample import choose, keep_top_p
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.streams import RequestStreams
from support.models import tiny_base_folder


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 7)), max_size=40), st.integers(1, 5))
def test_page_books_balance_after_every_step(steps: list[tuple[int, int, int]], page_rows: int) -> None:
    pool = PagePool(1, 400, page_rows, 1, 2, torch.float32)
    living = [RequestStreams(pool) for _ in range(4)]
    ends: dict[tuple[int, int], int] = {}
    for who, depth, rows in steps:
        if rows == 7:
            living[who].release()
            ends = {key: end for key, end in ends.items() if key[0] != who}
        else:
            # Gaps: a deep stream skips the positions that stopped earlier.
            start = ends.get((who, depth), 0) + depth
            living[who].append(depth, list(range(start, start + rows)))
            ends[who, depth] = start + rows
        held = [page for streams in living for page in streams.held()]
        pool.check(held)
        entries = sum(len(stream.positions) for streams in living for stream in streams.by_depth)
        streams_in_use = sum(bool(stream.pages) for streams in living for stream in streams.by_depth)
        assert entries <= len(held) * page_rows < entries + streams_in_use * page_rows + 1
        slots = torch.cat([s.slots(pool) for streams in living for s in streams.by_depth] or [torch.zeros(0)])
        assert len(slots.unique()) == entries, "no slot has two owners"


def test_wrong_books_are_loud() -> None:
    pool = PagePool(1, 2, 4, 1, 2, torch.float32)
    page = pool.take()
    with pytest.raises(RuntimeError, match="books"):
        pool.check([])
    pool.give_back([page])
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.give_back([page])
    pool.take()
    pool.take()
    with pytest.raises(RuntimeError, match="no page is free"):
        pool.take()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_one_depth_is_transformers_greedy(tmp_path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_base_folder(tmp_path / "base", architecture)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = Engine(load_model(folder), EngineLimits(pages=100, page_rows=4, rows_per_tick=16), lambda ids: "")
    prompts = [(5, 9, 77), tuple(range(30)), (200,)]
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, Sampling(0, max_tokens=12, ignore_stop_tokens=True)))
    got: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while engine.busy:
        for told in engine.tick():
            if isinstance(told.event, Progress):
                got[told.request_id] += [token.id for token in told.event.tokens]
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            want = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert got[str(number)] == want[0, len(prompt) :].tolist()


def test_sampling_follows_the_distribution_and_the_seed() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    counts = torch.zeros(4)
    for position in range(2000):
        counts[choose(log_probs, Sampling(1.0, 1.0, seed=1), 0, position)] += 1
    assert (counts / 2000 - log_probs.exp()).abs().max() < 0.04
    assert keep_top_p(log_probs, 0.8).isfinite().tolist() == [True, True, False, False]
    assert keep_top_p(log_probs, 0.01).isfinite().tolist() == [True, False, False, False]
    again = [choose(log_probs, Sampling(1.0, 1.0, seed=s), 0, 5) for s in range(40)]
    assert again == [choose(log_probs, Sampling(1.0, 1.0, seed=s), 0, 5) for s in range(40)]
    assert len(set(again)) > 1
