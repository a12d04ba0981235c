"""Bug reports of other platforms (training.md D.2) that concern data and its order, one test each, by their number.

Each goes the product's own way: ``prepare``, a step's plan, the packed rows that a forward gets; numbers 18 to 22
through the training loop itself. The properties behind them have their tests beside the parts, in tests/data and
tests/model.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.config.schema import DataConfig, MethodConfig, ObjectiveConfig, RunConfig
from fathom.data.packing import micro_batch_rows
from fathom.data.prepared import Prepared, prepare
from fathom.data.template import Renderer
from fathom.errors import DataError
from fathom.evals.items import read_items
from fathom.model.folder import load_model, load_tokenizer
from fathom.objectives.root import TrainingRoot
from fathom.orchestrate.run import run_recipe
from fathom.storage.manifest import fetch_folder
from fathom.train.plan import plan_step
from fathom.train.schedule import learning_rate
from support.command import fathom
from support.runs import tiny_recipe, write_questions
from support.tokenizers import CHATML, REWRITES, WITH_BOS, tiny_tokenizer
from support.watched import Watched

RENDERER = Renderer(tiny_tokenizer(CHATML))


def chat(*texts: str) -> dict[str, Any]:
    """A row of turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


def prepared(folder: Path, *rows: dict[str, Any], renderer: Renderer = RENDERER, **settings: Any) -> Prepared:
    """These rows as ``fathom prepare`` makes them."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(train=str(folder / "rows.jsonl"), **{"context_tokens": 200, **settings})
    return prepare(cfg, "train", renderer, folder / "prepared")


def forwards(folder: Path, data: Prepared, step: int = 0, world: int = 1, **changes: Any) -> list[list[Any]]:
    """The packed rows of a step, ``[rank][micro-batch]``, as the loop hands them to the model."""
    cfg = tiny_recipe(folder, **{"train__examples_per_step": len(data), "train__micro_batch_tokens": 200, **changes})
    plans = [plan_step(cfg, data, step, rank, world) for rank in range(world)]
    return [[micro_batch_rows(data, examples) for examples in plan.micro_batches] for plan in plans]


def test_04_a_packed_batch_keeps_the_mask(tmp_path: Path) -> None:
    """nanochat PR 582: after the whole pipeline exactly these tokens are learned."""
    data = prepared(tmp_path, {"question": "How?", "answer": "So."}, chat("Why?", "12", "And?", "no"))
    ((rows,),) = forwards(tmp_path, data)
    learned = [RENDERER.tokenizer.decode([token]) for token in rows.targets[rows.supervised].tolist()]
    texts = {0: ["S", "o", ".", "<|im_end|>"], 1: ["12", "<|im_end|>", "n", "o", "<|im_end|>"]}
    order = rows.example[rows.positions == 0].tolist()
    assert learned == [text for example in order for text in texts[example]]


def test_05_data_that_teaches_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL #6668: `fathom train` ends with exit code 2 before any work, not with a loss of zero."""
    cfg = tiny_recipe(tmp_path)
    Path(cfg.data.train_sources[0]).write_text(json.dumps({"messages": [{"role": "assistant", "content": "Hi"}]}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(cfg.model_dump(mode="json")))
    code, _, said = fathom(capsys, "train", recipe)
    assert code == 2 and "zero supervised tokens in 1 rows (1 no_supervised)" in said
    for rows in ([], [{"messages": [{"role": "user", "content": "q"}]}]):
        with pytest.raises(DataError, match="zero supervised tokens"):
            prepared(tmp_path, *rows)
    assert not (tmp_path / "prepared").exists()


def test_06_what_is_too_long_is_dropped_whole_and_counted(tmp_path: Path) -> None:
    """TRL #3927: nothing is cut; tokens in = tokens kept + tokens dropped, and how much supervision was lost."""
    rows = [
        *(chat(f"q{number}", f"the answer is {number}.") for number in range(3)),
        {"question": "q", "answer": "long " * 80},
        {"messages": [{"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "q"}]},
    ]
    for name in ("some", "whole"):
        (tmp_path / name).mkdir()
    counts = prepared(tmp_path / "some", *rows, context_tokens=64).counts
    assert counts["dropped"] == {"no_assistant_turn": 1, "no_supervised": 1, "too_long": 1}
    assert counts["rows"] == counts["documents"] + sum(counts["dropped"].values())
    whole = prepared(tmp_path / "whole", *rows, context_tokens=4096).counts
    for kind in ("tokens", "supervised_tokens"):
        assert counts[kind] + counts[f"dropped_{kind}"] == whole[kind] + whole[f"dropped_{kind}"]
        assert counts[f"dropped_{kind}"] > whole[f"dropped_{kind}"]


def test_07_a_template_that_rewrites_earlier_turns_marks_no_wrong_tokens(tmp_path: Path) -> None:
    """NeMo Automodel PR 3024: refused with the row's place, or only the last turn learned, checked by decoding."""
    rows = [chat("a", "b"), chat("one", "two", "three", "four")]
    renderer = Renderer(tiny_tokenizer(REWRITES))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: message 2: the chat template rewrites earlier turns"):
        prepared(tmp_path, *rows, renderer=renderer)
    data = prepared(tmp_path, *rows, renderer=renderer, supervise="last")
    ids, mask = data.document(1)
    prompt = renderer.prompt(rows[1]["messages"][:3])
    assert (ids[: len(prompt)], any(mask[: len(prompt)]), all(mask[len(prompt) :])) == (prompt, False, True)
    assert renderer.tokenizer.decode(ids[len(prompt) :]) == "<think>\n\n</think>\n\nfour<|im_end|>"


def test_08_serving_prompt_and_answer_are_the_training_tokens(tmp_path: Path) -> None:
    """TRL #6361: no empty think block before real reasoning, and a published model asks as it was trained."""
    thought = {"role": "assistant", "content": "12.", "reasoning_content": "4 + 8"}
    messages = [{"role": "user", "content": "How many?"}, thought, {"role": "user", "content": "Sure?"}]
    row = {"messages": [*messages, {"role": "assistant", "content": "Yes."}]}
    source = tmp_path / "reasoning.jsonl"
    source.write_text(json.dumps(row))
    cfg = tiny_recipe(tmp_path, train__steps=1, data__train=str(source), data__heldout=None, data__chat_format="qwen3")
    result = run_recipe(cfg, folder=tmp_path / "home")
    assert result.model_uri is not None
    fetch_folder(result.model_uri, tmp_path / "model")
    serving = Renderer(load_tokenizer(tmp_path / "model"))
    ids, mask = Prepared(tmp_path / "home" / "runs" / cfg.name / "data" / "train").document(0)
    text = serving.tokenizer.decode(ids)
    assert text.count("<think>") == 1 and "<|im_start|>assistant\n<think>\n4 + 8\n</think>\n\n12.<|im_end|>" in text
    for asked in (1, 3):
        prompt = serving.prompt(messages[:asked])
        answer = [token for token, wanted in zip(ids[len(prompt) :], mask[len(prompt) :], strict=True) if wanted]
        stop = len(prompt) + 1 + next(place for place, token in enumerate(answer) if token in serving.stop_ids)
        assert ids[: len(prompt)] == prompt and all(mask[len(prompt) : stop]) and not mask[len(prompt) - 1]


def test_09_the_generation_prompt_is_not_learned(tmp_path: Path) -> None:
    """NeMo Automodel PR 3739: what serving writes itself, here an opened block, is no target."""
    opened = CHATML.replace("{{ m['role'] }}\n", "{{ m['role'] }}\n{{ '<think>' if m['role'] == 'assistant' }}")
    opened = opened.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    renderer = Renderer(tiny_tokenizer(opened))
    row = chat("a", "so</think>b", "c", "d")
    data = prepared(tmp_path, row, renderer=renderer)
    ((rows,),) = forwards(tmp_path, data)
    learned = renderer.tokenizer.decode(rows.targets[rows.supervised])
    assert learned == "so</think>b<|im_end|>d<|im_end|>"
    assert renderer.tokenizer.decode(renderer.prompt(row["messages"][:1])).endswith("assistant\n<think>")


def test_10_every_turn_ends_with_a_learned_end_of_turn(tmp_path: Path) -> None:
    """TRL #1623: also where it is the padding token."""
    end = RENDERER.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == RENDERER.tokenizer.pad_token_id == RENDERER.tokenizer.eos_token_id
    ((rows,),) = forwards(tmp_path, prepared(tmp_path, chat("a", "b", "c", "d"), chat("e", "f", "g")))
    targets = rows.targets[rows.supervised].tolist()
    assert targets.count(end) == 3 and targets[-1] == end


def test_11_one_bos_in_training_evaluation_and_serving(tmp_path: Path) -> None:
    """vLLM PR 27515: the template writes it, and the tokenizer, which would add another, is never asked to."""
    renderer = Renderer(tiny_tokenizer(WITH_BOS, adds_bos=True))
    bos = renderer.tokenizer.bos_token_id
    data = prepared(tmp_path, chat("a", "b"), renderer=renderer)
    ((rows,),) = forwards(tmp_path, data)
    assert rows.ids.tolist().count(bos) == 1 and rows.ids[0] == bos
    (item,) = read_items(str(tmp_path / "rows.jsonl"), DataConfig(train="unused"), renderer)
    assert item.prompt.count(bos) == 1 and item.prompt[0] == bos
    assert renderer.prompt(chat("a", "b", "c")["messages"]).count(bos) == 1


def test_12_packed_conversations_do_not_see_each_other(tmp_path: Path) -> None:
    """TRL #3067: log-probabilities, depths, keys of every depth and the look-ahead are those of each alone."""
    cfg = tiny_recipe(tmp_path)
    model = load_model(cfg.model.base, MethodConfig(preset="tah2", max_depth=2), torch.float64, seed=1)
    renderer = Renderer(load_tokenizer(cfg.model.base))
    rows = [chat(f"{number} + 1?", f"It is {number + 1}.") for number in range(4)]
    data = prepared(tmp_path, *rows, renderer=renderer)
    root = TrainingRoot(model, ObjectiveConfig())
    names = [*(f"{what}/{m}" for what in ("rows", "pairs", "executed", "depth_loss") for m in (1, 2)), "gain/1"]

    def measured(examples: list[int]) -> dict[str, float]:
        _, stats = root(*micro_batch_rows(data, examples))
        at = dict(zip(root.stat_names, stats.tolist(), strict=True))
        return {name: at[name] for name in names}

    packed, alone = measured([0, 1, 2, 3]), [measured([example]) for example in range(4)]
    assert packed["gain/1"] != 0.0, "the look-ahead measured something"
    for name in names:
        assert packed[name] == pytest.approx(sum(each[name] for each in alone), abs=1e-8), name
    with torch.no_grad():
        together = model(micro_batch_rows(data, [0, 1, 2, 3]))
        starts = [0, *data.lengths.cumsum().tolist()]
        for example in range(4):
            own = slice(starts[example], starts[example + 1])
            one = model(micro_batch_rows(data, [example]))
            torch.testing.assert_close(together.log_prob[own], one.log_prob, atol=1e-10, rtol=0)
            assert torch.equal(together.executed[own], one.executed)


@pytest.mark.parametrize("world", [1, 2])
def test_13_no_conversation_is_cut_or_lost_by_packing(tmp_path: Path, world: int) -> None:
    """TRL #5075: over an epoch every conversation lies in one forward, whole and once."""
    data = prepared(tmp_path, *(chat("q", "word " * (1 + number * 7 % 20)) for number in range(23)))
    packed = [rows for rank in forwards(tmp_path, data, world=world) for rows in rank if rows.count]
    found = {
        int(rows.example[rows.sequence == place][0]): rows.ids[rows.sequence == place].tolist()
        for rows in packed
        for place in range(int(rows.sequence.max()) + 1)
    }
    assert found == {number: data.document(number)[0] for number in range(23)}
    assert sum(rows.count for rows in packed) == data.counts["tokens"]


def test_14_a_length_at_the_limit_still_packs(tmp_path: Path) -> None:
    """TRL #3887: two conversations of exactly half a forward share one; with a token less of room they do not."""
    data = prepared(tmp_path, *(chat("q", "a") for _ in range(4)))
    length = int(data.lengths[0])
    for room, count in ((2 * length, 2), (2 * length - 1, 4), (4 * length, 1), (length, 4)):
        changes = {"train__micro_batch_tokens": room, "data__context_tokens": length}
        ((*rows,),) = forwards(tmp_path, data, **changes)
        assert len(rows) == count and sum(each.count for each in rows) == 4 * length


def order_recipe(folder: Path, documents: int, **changes: Any) -> tuple[RunConfig, Prepared]:
    """A recipe of 12 steps over so many conversations, and its data."""
    cfg = tiny_recipe(
        folder, **{"train__steps": 12, "checkpoint__every_steps": 2, "train__examples_per_step": 3} | changes
    )
    write_questions(folder / "train.jsonl", range(documents))
    renderer = Renderer(load_tokenizer(cfg.model.base))
    return cfg, prepare(cfg.data, "train", renderer, folder / "order")


def uninterrupted(cfg: RunConfig, data: Prepared) -> Watched:
    """A run on one rank that nothing disturbs."""
    whole = Watched()
    whole.attempt(cfg, data)
    assert whole.finished and list(whole.examples) == list(range(1, (cfg.train.steps or 0) + 1))
    return whole


def same_order(run: Watched, whole: Watched) -> None:
    """Whatever was run, also twice, was as in the run that nothing disturbed."""
    assert run.finished and run.examples.keys() == whole.examples.keys()
    for step, attempts in run.examples.items():
        assert all(examples == whole.examples[step][0] for examples in attempts), f"step {step}"


def test_18_the_learning_rate_is_the_same_after_a_resume_and_on_two_ranks(tmp_path: Path) -> None:
    """accelerate #2926: it is a function of the step alone."""
    cfg, data = order_recipe(tmp_path, 8, schedule__warmup_ratio=0.3)
    table = {step: learning_rate(cfg.schedule, 1e-3, step - 1, 12) for step in range(1, 13)}
    assert len(set(table.values())) == 12
    run = Watched()
    for world, kill_after in ((2, 5), (1, 9), (2, None)):
        run.attempt(cfg, data, world, kill_after)
    assert {step: set(rates) for step, rates in run.rates.items()} == {step: {rate} for step, rate in table.items()}


def test_19_a_kill_at_any_step_leaves_the_order_of_examples(tmp_path: Path) -> None:
    """accelerate PR 4071."""
    cfg, data = order_recipe(tmp_path, 8)
    whole = uninterrupted(cfg, data)
    for kill_after in range(1, 12):
        run = Watched()
        run.attempt(cfg, data, kill_after=kill_after)
        assert not run.finished
        run.attempt(cfg, data)
        same_order(run, whole)


def test_20_the_fourth_resume_within_an_epoch_is_like_the_first(tmp_path: Path) -> None:
    """KempnerForge #57: the second one shifted the data."""
    cfg, data = order_recipe(tmp_path, 40)
    run = Watched()
    for kill_after in (3, 5, 6, 9):
        run.attempt(cfg, data, kill_after=kill_after)
    run.attempt(cfg, data)
    same_order(run, uninterrupted(cfg, data))
    assert max(Counter(example for attempts in run.examples.values() for example in attempts[0]).values()) == 1


@pytest.mark.parametrize("kill_after", [2, 3, 4, 5])
def test_21_a_checkpoint_at_the_end_of_an_epoch_skips_nothing(tmp_path: Path, kill_after: int) -> None:
    """verl #7401: steps and examples seen are those of the plan; an epoch here is two steps, each commit ends one."""
    cfg, data = order_recipe(tmp_path, 8, train__examples_per_step=4)
    run = Watched()
    run.attempt(cfg, data, kill_after=kill_after)
    assert run.saved is None or run.saved["step"] * 4 % len(data) == 0
    run.attempt(cfg, data)
    same_order(run, uninterrupted(cfg, data))
    assert run.saved is not None and run.saved["step"] == 12
    seen = Counter(example for attempts in run.examples.values() for example in attempts[-1])
    assert seen == Counter(dict.fromkeys(range(8), 12 * 4 // 8))


def test_22_another_number_of_ranks_in_an_epoch_sees_the_same_steps(tmp_path: Path) -> None:
    """torchtitan #816: 2, then 1, then 3 ranks; of one source and of a mixture."""
    cfg, data = order_recipe(tmp_path, 20)
    other = tmp_path / "other.jsonl"
    write_questions(other, range(30, 36))
    both = [{"source": str(tmp_path / "train.jsonl"), "weight": 2}, {"source": str(other), "weight": 1}]
    mixed = tiny_recipe(tmp_path, **{"train__steps": 12, "checkpoint__every_steps": 2, "data__train": both})
    mixture = prepare(mixed.data, "train", Renderer(load_tokenizer(mixed.model.base)), tmp_path / "mixed")
    for recipe, documents in ((cfg, data), (mixed, mixture)):
        run = Watched()
        for world, kill_after in ((2, 5), (1, 7), (3, None)):
            run.attempt(recipe, documents, world, kill_after)
        same_order(run, uninterrupted(recipe, documents))
