"""A request's own M, below the model's: every method answers as a forward of so many depths, prompts cut over ticks."""

from dataclasses import replace

import pytest
import torch

from fathom.model.levels import LoopOptions
from fathom.model.rows import pack_documents
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.request import Depth, Progress
from model.test_methods import model_of
from serving.test_engine_methods import LIMITS, ask


@pytest.mark.parametrize("name", ["tah2", "tah", "ouro-adaptive", "act", "huginn", "mor-expert", "mor-token"])
def test_fewer_depths_than_the_model_has(name: str) -> None:
    model = model_of(name).eval()
    engine = Engine(model, LIMITS, decode=lambda ids: "")
    requests = {number: replace(ask(number, 9, 4), depth=Depth(max_depth=number)) for number in (1, 2, 3)}
    for request in requests.values():
        engine.submit(request)
    told = []
    while engine.busy:
        told += engine.tick()
    for number, request in requests.items():
        events = [each.event for each in told if each.request_id == request.id]
        got = [token for event in events if isinstance(event, Progress) for token in event.tokens]
        ids = [*request.prompt, *(token.id for token in got)]
        rows = pack_documents([(ids, [place > 8 for place in range(len(ids))])], [number])
        with torch.no_grad():
            trace = model(rows, options=LoopOptions(max_depth=number))
        answered = slice(8, 8 + len(got))
        assert [token.depth for token in got] == trace.executed[answered].tolist()
        assert [token.logprob for token in got] == pytest.approx(trace.log_prob[answered].tolist(), abs=1e-9)
        assert int(trace.executed.max()) <= number
