"""Page books under random histories; and at one depth the engine is transformers' greedy generation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.model.folder import load_model
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Progress, Request, Sampling
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.streams import RequestStreams
from support.models import tiny_base_folder


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 8)), max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_page_books_balance_after_every_step(steps: list[tuple[int, int, int]], page_rows: int, pages: int) -> None:
    pool, block = PagePool(1, 400, page_rows, 1, 2, torch.float64), page_rows * pages
    living = [RequestStreams(pool, block) for _ in range(4)]
    ends: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int], list[float]] = {}
    for number, (who, depth, rows) in enumerate(steps):
        if rows == 7:
            living[who].release()
            ends = {key: end for key, end in ends.items() if key[0] != who}
            written = {key: entries for key, entries in written.items() if key[0] != who}
        elif rows == 8:
            # Another answer to the same prompt, in the next one's place.
            other = (who + 1) % 4
            living[other].release()
            living[other] = living[who].fork()
            ends = {key: end for key, end in ends.items() if key[0] != other}
            ends |= {(other, level): end for (owner, level), end in ends.items() if owner == who}
            written = {key: entries for key, entries in written.items() if key[0] != other}
            written |= {(other, level): entries for (owner, level), entries in written.items() if owner == who}
        else:
            # Gaps: a deep stream skips the positions that stopped earlier.
            start = ends.get((who, depth), 0) + depth
            positions = list(range(start, start + rows))
            free = pool.free
            fits = [living[who].fits(depth, positions, pages) for pages in range(rows + 2)]
            living[who].append(depth, positions)
            needed = free - pool.free
            assert fits.index(rows) == needed, "as many pages as were foretold"
            ends[who, depth] = start + rows
            fresh = living[who].by_depth[depth - 1].slots[-rows:]
            assert not any(pool.shared(int(slot) // page_rows) for slot in fresh)
            pool.keys[0, fresh] = float(number)
            written[who, depth] = [*written.get((who, depth), []), *[float(number)] * rows]
        pool.check([page for streams in living for page in streams.held()])
        for who, streams in enumerate(living):
            for level, stream in enumerate(streams.by_depth, start=1):
                # A page holds positions of one block, and only the last of a block has room.
                places = list(
                    zip((stream.slots // page_rows).tolist(), (stream.positions // block).tolist(), strict=True)
                )
                assert len(set(places)) == len(stream.pages)
                for number in set((stream.positions // block).tolist()):
                    inside = sum(of == number for _, of in places)
                    assert len({page for page, of in places if of == number}) == -(-inside // page_rows)
                assert pool.keys[0, stream.slots, 0, 0].tolist() == written.get((who, level), [])
                assert stream.positions.tolist() == sorted(set(stream.positions.tolist()))


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
