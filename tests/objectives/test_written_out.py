"""TaH2's loss and gradients against the paper's formulas, written out over transformers' own Llama with dense masks."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fathom.config.schema import MethodConfig, ObjectiveConfig
from fathom.model.folder import load_model, stored_name
from fathom.model.rows import PackedRows
from fathom.objectives.root import TrainingRoot
from support.models import random_rows, tiny_base_folder


class Added(NamedTuple):
    """The parameters of updater and decider by their names, as ``[out, in]`` or ``[d]``."""

    of: dict[str, Tensor]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.of[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.of[f"{name}.weight"].T

    def swiglu(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gate * torch.sigmoid(gate) * up)

    def update(self, e: Tensor, h: Tensor) -> Tensor:
        """Eq. 9."""
        joined = torch.cat((self.norm("update.norm_embedding", e), self.norm("update.norm_hidden", h)), -1)
        joined = self.norm("update.norm_joined", self.linear("update.join", joined))
        return self.norm("update.norm_out", self.swiglu("update.mlp", joined))

    def continue_prob(self, e: Tensor, h: Tensor, q: Tensor) -> Tensor:
        """Eq. 10."""
        top = q.sort(-1, descending=True).values[:, : e.shape[1]]
        streams = [self.norm(f"decider.norm_{what}", x) for what, x in (("embedding", e), ("hidden", h), ("top", top))]
        mixed = self.swiglu("decider.mlp", self.linear("decider.join", torch.cat(streams, -1)))
        return self.linear("decider.score", self.norm("decider.norm_out", mixed))[:, 0].sigmoid()


def written_out(llama, added: Added, rows: PackedRows) -> Tensor:
    """The loss of one document with M = 2: Eq. 4 to 7, 25 and 26 at rho 0.99 and alpha_D 0.05."""
    table, count = llama.get_input_embeddings().weight, rows.count
    e = table[rows.ids]

    def run(deeper: Tensor, index: Tensor, alone: Tensor) -> Tensor:
        """Hidden states of all depth-1 rows, then of ``deeper``: depth-2 rows of the tokens ``index``."""
        token = torch.cat((torch.arange(count), index))
        depth = torch.cat((torch.ones(count), torch.full((len(index),), 2.0)))
        hypothetical = torch.cat((torch.zeros(count, dtype=torch.bool), alone))
        seen = (token[None] <= token[:, None]) & (depth[None] <= depth[:, None])
        seen &= ~hypothetical[None] | torch.eye(len(token), dtype=torch.bool)
        mask = torch.zeros(seen.shape, dtype=e.dtype).masked_fill(~seen, -torch.inf)
        return llama.model(
            inputs_embeds=torch.cat((e, deeper))[None],
            attention_mask=mask[None, None],
            position_ids=token[None],
            use_cache=False,
        ).last_hidden_state[0]

    def log_q(h: Tensor, index: Tensor) -> Tensor:
        return (h @ table.T).log_softmax(-1)[torch.arange(len(index)), rows.targets[index]]

    everyone, nobody = torch.arange(count), torch.arange(0)
    first = run(e[nobody], nobody, nobody.bool())
    g = added.continue_prob(e, first, (first @ table.T).softmax(-1))
    on, off = (g > 0.5).nonzero()[:, 0], ((g <= 0.5) & rows.supervised).nonzero()[:, 0]
    entered = added.update(e[on], first[on])
    second = run(entered, on, torch.zeros(len(on), dtype=torch.bool))[count:]
    one, two = log_q(first, everyone), log_q(second, on)
    mixture = one.index_put((on,), ((1 - g[on]) * one[on].exp() + g[on] * two.exp()).log())

    with torch.no_grad():
        index, alone = torch.cat((on, off)), torch.arange(len(on) + len(off)) >= len(on)
        ahead = run(torch.cat((entered, added.update(e[off], first[off]))), index, alone)[count + len(on) :]
        gain = torch.zeros(count, dtype=e.dtype)
        gain[on], gain[off] = two - one[on], log_q(ahead, off) - one[off]
        gain = gain[rows.supervised]
        ranked = sorted((x for x in gain.tolist() if x > 0), reverse=True)
        covered = [sum(ranked[: n + 1]) >= 0.99 * sum(ranked) for n in range(len(ranked))]
        cut = ranked[covered.index(True)]
        label, weight = gain >= cut, (gain - cut).abs().clamp(1e-6, 1.0)
        assert label.any() and (~label & (gain > 0)).any() and on.numel() and off.numel(), "every case must occur"
        beta = (~label).sum() / label.sum()
    sure = g[rows.supervised]
    decisions = weight * torch.where(label, -beta * sure.log(), -(1 - sure).log())
    return -mixture[rows.supervised].sum() + 0.05 * decisions.sum()


@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_every_gradient_equal_the_published_formulas(seed, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_base_folder(tmp_path)
    llama = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64, attn_implementation="eager")
    model = load_model(folder, MethodConfig(preset="tah2", max_depth=2), torch.float64, seed=seed)
    model.decider.score.weight.data.mul_(20)  # as a trained one: not all near 0.5
    rows = random_rows([60], seed=seed)
    loss, _ = TrainingRoot(model, ObjectiveConfig())(*rows)
    loss.backward()

    fresh = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = written_out(llama, Added(fresh), rows)
    expected.backward()
    # As close as transformers allows, whose norms and rotary angles stay in fp32.
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-6)
    theirs = dict(llama.named_parameters())
    for name, p in model.named_parameters():
        found = fresh[name].grad if name.startswith(("update.", "decider.")) else theirs[stored_name(name)].grad
        torch.testing.assert_close(p.grad, found, atol=1e-5, rtol=1e-4, msg=lambda text, at=name: f"{at}: {text}")
