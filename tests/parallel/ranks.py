"""One rank of a strategy's checks, run by test_strategies.py: ``ranks.py STRATEGY RANK WORLD FOLDER SAVED [OTHER]``.

Starting ranks costs far more than what they compute, so one launch does everything and leaves its findings in FOLDER.
``SAVED`` holds the reference's state after :data:`BEFORE` steps, ``OTHER`` another strategy's.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fathom.config.schema import ObjectiveConfig, OptimizerConfig
from fathom.model.collectives import Collectives, ProcessGroup
from fathom.model.config import read_config
from fathom.model.looped import LoopedLM
from fathom.model.methods import make_method
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.context import Draw
from fathom.objectives.pool import decide_step
from fathom.objectives.root import TrainingRoot
from fathom.parallel.averaged import AveragedStrategy
from fathom.parallel.strategy import Strategy, create_strategy
from fathom.parallel.zero import ZeroStrategy
from fathom.train.loop import draw_key
from fathom.train.session import added_parameters
from support import one_result

SHAPE = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 12,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, clip_norm=0.7, weight_decay=0.5, added_rate_factor=2.0)
DECAY = 0.7
BEFORE, AFTER, MICRO_BATCHES, RANKS = 2, 1, 2, 2


METHODS = ("ouro", "tah", "act", "mor-expert", "mor-token", "huginn-post", "loopus", "tah2 with a value head")
"""Besides TaH2: adapters, gates, routers, drawn depths with truncated backprop, passes without a gradient, a module
beside the model. The first word is the preset."""
UNSHARDED = {"zero": {"loopus"}}
"""Refused there (``Objective.alternates_gradient``)."""
OBJECTIVES = {
    "huginn-post": ObjectiveConfig(mean_depth=2.0, gradient_depths=1),
    "loopus": ObjectiveConfig(supervised_depths=2),
    "tah2 with a value head": ObjectiveConfig(decider_weight=0.5, lookahead_fraction=0.5, value_head=0.5),
}


def make_root(collectives: Collectives, preset: str = "tah2") -> TrainingRoot:
    """A tiny model that loops, alike wherever it is made; of four layers where some are prelude and coda."""
    shape = SHAPE | ({"num_hidden_layers": 4} if preset in METHODS else {})
    model = LoopedLM(read_config(shape, "tiny"), make_method(preset.split()[0], 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith(("update.", "decider.")):
                parameter.normal_(0.0, 0.3, generator=generator)
    model.reset_added(seed=3)
    objective = OBJECTIVES.get(preset, ObjectiveConfig(decider_weight=0.5))
    return TrainingRoot(model, objective, collectives, checkpointing=True)


def make_strategy(name: str, collectives: Collectives, preset: str = "tah2") -> Strategy:
    return wrap(name, make_root(collectives, preset), OPTIMIZER, collectives)


def wrap(name: str, root: TrainingRoot, optimizer: OptimizerConfig, collectives: Collectives) -> Strategy:
    added = added_parameters(root)
    if name == "zero":
        return ZeroStrategy(root, optimizer, collectives, torch.device("cpu"), added, persist_elements=0)
    return create_strategy(name, root, optimizer, list(root.model.backbone.layers), collectives, added=added)


def documents(step: int, micro_batch: int, rank: int) -> list[tuple[list[int], list[bool]]]:
    """Ragged documents; rank 1 has nothing in the first micro-batch of step 1."""
    if (step, micro_batch, rank) == (1, 0, 1):
        return []
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    lengths = torch.randint(4, 14, (1 + rank + micro_batch,), generator=generator).tolist()
    return [
        (torch.randint(0, 61, (n,), generator=generator).tolist(), [place > n // 3 for place in range(n)])
        for n in lengths
    ]


def micro_batches(step: int, rank: int, world: int) -> list[PackedRows]:
    """This rank's rows; one process takes those of all ranks together."""
    ranks = [rank] if world == RANKS else range(RANKS)
    packed = [pack_documents([each for r in ranks for each in documents(step, m, r)]) for m in range(MICRO_BATCHES)]
    return [rows._replace(oracle=rows.ids % 3 + 1) for rows in packed]


def train(strategy: Strategy, first: int, steps: int, pooled: bool = False) -> list[dict[str, float]]:
    """Optimizer steps ``first`` .. ``first + steps - 1``, perhaps with labels of the whole step; what each found."""
    history = []
    for step in range(first, first + steps):
        every = micro_batches(step, strategy.rank, strategy.world)
        batches = [(rows, Draw(draw_key(0, step, number))) for number, rows in enumerate(every)]
        count = float(strategy.sum(torch.tensor(float(sum(int(rows.supervised.sum()) for rows in every)))))
        given: list[dict[str, object]] = [{}] * MICRO_BATCHES
        if pooled:
            decided = decide_step(strategy.root, batches, ObjectiveConfig(), strategy.collectives)
            given = [each._asdict() for each in decided]
        total = torch.zeros(())
        for number, (rows, draw) in enumerate(batches):
            loss, _ = strategy.root(*rows, draw=draw, **given[number])
            total += loss.detach()
            strategy.backward(loss / count, last=number == MICRO_BATCHES - 1)
        norm = strategy.step(1e-2, OPTIMIZER.clip_norm)
        history.append({"norm": norm, "loss": float(strategy.sum(total)) / count})
    return history


def save(strategy: Strategy, folder: Path) -> None:
    """This rank's ranges, in one file of tensors and one of places."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = strategy.shards()
    save_file(
        {key: shard.values.contiguous().clone() for key, shard in shards.items()},
        folder / f"{strategy.rank}.safetensors",
    )
    places = {key: [shard.shape, shard.start, shard.values.numel()] for key, shard in shards.items()}
    (folder / f"{strategy.rank}.json").write_text(json.dumps(places))


def load_whole(folder: Path) -> dict[str, Tensor]:
    """Flattened tensors put together from all ranks' files; a range nobody saved is NaN."""
    whole: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.json")):
        with safe_open(file.with_suffix(".safetensors"), "pt") as tensors:
            for key, (shape, start, count) in json.loads(file.read_text()).items():
                flat = whole.setdefault(key, torch.full((int(torch.tensor(shape).prod()),), torch.nan))
                flat[start : start + count] = tensors.get_tensor(key)
    return whole


def load(strategy: Strategy, folder: Path, updates: int) -> None:
    whole = load_whole(folder)
    strategy.load_shards(lambda key, start, stop: whole[key][start:stop], updates)


def poisoned_step(strategy: Strategy) -> dict[str, object]:
    """A step whose loss is not a number on one rank: is anything updated?"""
    before = {key: shard.values.clone() for key, shard in strategy.shards().items()}
    rows = micro_batches(0, strategy.rank, strategy.world)[1]
    loss, _ = strategy.root(*rows)
    strategy.backward(loss * (torch.nan if strategy.rank == 0 else 1.0), last=True)
    norm = strategy.step(1e-2, OPTIMIZER.clip_norm)
    same = all(torch.equal(before[key], shard.values) for key, shard in strategy.shards().items())
    return {"finite": bool(torch.isfinite(torch.tensor(norm))), "unchanged": same, "updates": strategy.updates}


def one_of_many_ways(name: str, group: Collectives, method: str, file: Path) -> list[float]:
    """This strategy's way to a step's one result (:mod:`support.one_result`); its norms, and on rank 0 the file."""
    cells = one_result.spread(group.rank)
    result = one_result.train(
        lambda root: wrap(name, root, one_result.OPTIMIZER, group), method, *cells, group, checkpointing=True
    )
    if result.found:
        save_file(result.found, file)
    return result.norms


def main(name: str, rank: int, world: int, folder: Path, saved: list[Path]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    group = ProcessGroup()
    findings: dict[str, object] = {}
    strategy = make_strategy(name, group)
    findings["history"] = train(strategy, 0, BEFORE)
    save(strategy, folder / "saved")
    findings["poisoned"] = poisoned_step(strategy)
    findings["history"] += train(strategy, BEFORE, AFTER)
    findings["held"] = sum(shard.values.numel() for shard in strategy.shards().values())
    state = strategy.full_model_state()
    if rank == 0 and state is not None:
        save_file(state, folder / "final.safetensors")
    dist.barrier()
    for number, source in enumerate([folder / "saved", *saved]):
        resumed = make_strategy(name, group)
        load(resumed, source, BEFORE)
        findings[f"resumed/{number}"] = train(resumed, BEFORE, AFTER)
        state = resumed.full_model_state()
        if rank == 0 and state is not None:
            save_file(state, folder / f"resumed-{number}.safetensors")
    for preset in METHODS:
        if preset not in UNSHARDED.get(name, set()):
            findings[f"method/{preset}"] = train(make_strategy(name, group, preset), 0, BEFORE)
    averaged = AveragedStrategy(make_strategy(name, group), DECAY)
    train(averaged, 0, BEFORE)
    save(averaged, folder / "averaged")
    resumed = AveragedStrategy(make_strategy(name, group), DECAY)
    load(resumed, folder / "averaged", BEFORE)
    train(resumed, BEFORE, AFTER)
    train(averaged, BEFORE, AFTER)
    for each, what in ((averaged, "averaged"), (resumed, "averaged-resumed")):
        state = each.full_model_state()
        if rank == 0 and state is not None:
            save_file(state, folder / f"{what}.safetensors")
    findings["pooled"] = train(make_strategy(name, group), 0, BEFORE, pooled=True)
    for number, method in enumerate(one_result.METHODS):
        findings[f"one/{method}"] = one_of_many_ways(name, group, method, folder / f"one-{number}.safetensors")
    (folder / f"findings-{rank}.json").write_text(json.dumps(findings))
    dist.barrier()
    # Not through the interpreter's end: there gloo's thread may free the last work's tensors, and the process aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": sys.argv[2]}
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), [Path(each) for each in sys.argv[5:]])
