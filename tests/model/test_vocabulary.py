"""The chunked head against plain softmax arithmetic, gradients included."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.model.vocabulary import TokenTable, read_logits, read_out


def plain(hidden, weight, targets, k):
    logits = hidden @ weight.T
    log_q = logits.log_softmax(-1)
    top = log_q.exp().topk(min(k, weight.shape[0]), dim=-1).values
    top = torch.nn.functional.pad(top, (0, k - top.shape[1]))
    return log_q.gather(1, targets[:, None])[:, 0], logits.logsumexp(-1), top


@pytest.mark.parametrize(("vocab", "k", "chunk"), [(50, 8, 4), (50, 0, 7), (6, 8, 100), (50, 50, 1)])
def test_values_and_gradients_equal_plain_arithmetic(vocab, k, chunk):
    """With a random weight on every row of every output (Liger #968: gradients wrong for non-uniform weights)."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 16, dtype=torch.float64), torch.randn(vocab, 16, dtype=torch.float64)
    targets = torch.randint(vocab, (13,))
    taught = torch.rand(13) < 0.7  # the backward leaves out rows that nothing pulls at
    pulls = [torch.randn(13, *shape).double() * taught.view(-1, *(1 for _ in shape)) for shape in ((), (), (k,))]
    results = []
    for function in (lambda h, w: read_out(h, w, targets, k, chunk)[:3], lambda h, w: plain(h, w, targets, k)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = function(h, w)
        sum((output * pull).sum() for output, pull in zip(outputs, pulls, strict=True)).backward()
        results.append((*outputs, h.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("rows", [64, 1024])
def test_no_tensor_grows_with_rows_times_vocabulary(rows):
    vocab, width, chunk = 3000, 8, 16
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    with LargestTensor() as seen:
        out = read_out(hidden, weight, torch.zeros(rows, dtype=torch.int64), 8, chunk)
        (out.log_prob.sum() + out.top.sum()).backward()
    assert seen.largest == chunk * vocab


class Casts(TorchDispatchMode):
    """Counts copies of a tensor of one size into another dtype."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count += function is torch.ops.aten._to_copy.default and out.numel() == self.size
        return out


def test_the_weight_is_cast_once_a_direction_however_many_chunks():
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(300, 8, requires_grad=True)
    with Casts(weight.numel()) as casts, torch.autocast("cpu", torch.bfloat16):
        read_out(hidden, weight, torch.zeros(64, dtype=torch.int64), 8, 4).log_prob.sum().backward()
    assert casts.count == 2


def test_top_probabilities_are_of_the_full_softmax():
    logits = torch.randn(3, 20)
    top = read_logits(logits, 5).top
    assert torch.allclose(top, logits.softmax(-1).sort(descending=True).values[:, :5])
    assert read_logits(logits, 30).top.shape == (3, 30)
    assert torch.allclose(read_logits(logits, 30).top.sum(-1), torch.ones(3))


def test_bf16_autocast_stays_close():
    torch.manual_seed(0)
    table = TokenTable(500, 64, tied=True)
    torch.nn.init.normal_(table.embedding, std=0.1)
    hidden, targets = torch.randn(40, 64), torch.randint(500, (40,))
    exact = table(head=(hidden, targets, 8, 16, None))
    with torch.autocast("cpu", torch.bfloat16):
        rough = table(head=(hidden, targets, 8, 16, None))
    assert rough.log_prob.dtype == torch.float32
    assert 0 < (rough.log_prob - exact.log_prob).abs().max() < 0.05
