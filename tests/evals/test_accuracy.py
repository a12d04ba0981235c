"""Graded answers: scripted ones counted by hand, and a real engine's."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from fathom.cli.answers import engine_generate, seed_of
from fathom.config.schema import DataConfig
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from fathom.evals.accuracy import (
    Responses,
    accuracy_curve,
    cutoff_settings,
    grade_responses,
    majority,
    measured,
    respond,
    threshold_settings,
    truncate,
)
from fathom.evals.generation import Generation, Sampling
from fathom.evals.items import Item, read_items
from fathom.evals.plain import plain
from fathom.evals.plots import plot_accuracy, plot_curves
from fathom.model.flops import decode_flops
from fathom.model.folder import load_tokenizer
from support.models import tiny_model, tiny_tokenizer_files

ITEMS = [Item([1, 2, 3], "so 3 + 4 = 7", "t:1"), Item([4], "12", "t:2"), Item([5, 6], "0", "t:3")]
TEXTS = [["it is 7", "7.0", "8, no 9"], ["11", "13", "12"], ["none", "", "-"]]


def generation(text: str, depth: int = 1) -> Generation:
    """One token per character."""
    return Generation(text, [ord(letter) for letter in text], [depth] * len(text), [1, 2])


def spell(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def scripted(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
    assert sampling.temperature == 0.6
    assert [list(prompt) for prompt in prompts] == [item.prompt for item in ITEMS for _ in range(3)]
    return [generation(text, depth=2) for texts in TEXTS for text in texts]


def count_rows(prompt: list[int], depths: list[int]) -> float:
    return float(sum(depths))


def responses() -> Responses:
    return respond(ITEMS, scripted, Sampling(8, 0.6), samples=3)


def test_avg_and_cons_at_k_counted_by_hand():
    found = grade_responses(responses(), count_rows)
    assert [item.right for item in found.answered] == [[True, True, False], [False, False, True], [False] * 3]
    assert [item.majority_right for item in found.answered] == [True, False, False]
    assert found.average.value == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert found.consensus.value == pytest.approx(1 / 3)
    assert found.average.low < found.average.value < found.average.high
    lengths = [len(text) for texts in TEXTS for text in texts]
    assert found.tokens_per_answer == pytest.approx(sum(lengths) / 9)
    assert found.flops_per_answer == pytest.approx(2 * sum(lengths) / 9)
    assert found.at_limit == pytest.approx(sum(length >= 8 for length in lengths) / 9)
    assert (found.mean_depth, found.prompt_mean_depth) == (2.0, 1.5)
    assert plain(found.answered[0]) == {"where": "t:1", "right": [True, True, False], "majority_right": True}


def test_the_majority_is_the_first_among_equals_and_silence_does_not_vote():
    for votes in itertools.product([None, 1, 2], repeat=4):
        spoken = [vote for vote in votes if vote is not None]
        best = None
        for vote in spoken:
            if best is None or spoken.count(vote) > spoken.count(best):
                best = vote
        assert majority(votes) == best


def test_cutoffs_grade_what_is_left_of_the_same_answers():
    whole = responses()
    cut = truncate(whole, 2, spell)
    assert [[answer.text for answer in answers] for answers in cut.answers] == [
        ["it", "7.", "8,"],
        ["11", "13", "12"],
        ["no", "", "-"],
    ]
    assert all(len(answer.depths) == len(answer.tokens) <= 2 for answers in cut.answers for answer in answers)
    settings = cutoff_settings(whole, [1, 2, 8], spell, count_rows)
    assert settings == [measured(cutoff, truncate(whole, cutoff, spell), count_rows) for cutoff in (1, 2, 8)]
    # "7.0" is right as soon as its 7 is there; "12" needs both digits; "it is 7" all seven.
    assert [entry.totals for entry in settings] == [
        pytest.approx([100 / 3, 0, 0]),
        pytest.approx([100 / 3, 100 / 3, 0]),
        pytest.approx([200 / 3, 100 / 3, 0]),
    ]
    assert settings[1].flops == pytest.approx([2 * 6 / 3, 2 * 6 / 3, 2 * 3 / 3])
    curve = accuracy_curve("model", "cutoff", settings)
    assert [point.setting for point in curve.points] == [1, 2, 8] and curve.slope.value > 0


def test_thresholds_are_generated_one_by_one():
    asked = []

    def at_threshold(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        asked.append(sampling)
        return [generation("7" if sampling.threshold == 0.2 else "8", depth=1 + (sampling.threshold == 0.2))] * 6

    settings = threshold_settings(ITEMS, at_threshold, Sampling(8, 0.6, seed=9), [0.2, 0.8], count_rows, samples=2)
    assert asked == [Sampling(8, 0.6, seed=9, threshold=tau) for tau in (0.2, 0.8)]
    assert [(entry.setting, list(entry.flops), list(entry.totals)) for entry in settings] == [
        (0.2, [2, 2, 2], [100, 0, 0]),
        (0.8, [1, 1, 1], [0, 0, 0]),
    ]
    with pytest.raises(ConfigError, match=r"threshold -0\.1"):
        threshold_settings(ITEMS, at_threshold, Sampling(8), [-0.1, 0.5], count_rows)


def test_text_must_match_whole():
    items = [Item([1], "a  b\n", "t:1"), Item([1], "a b", "t:2")]
    answers = [[generation("a b ")], [generation("a b c")]]
    found = grade_responses(Responses(items, answers, Sampling(8)), count_rows, "text")
    assert [item.right for item in found.answered] == [[True], [False]]


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="at temperature 0 are the same"):
        respond(ITEMS, scripted, Sampling(8), samples=2)
    with pytest.raises(ConfigError, match="0 samples"):
        respond(ITEMS, scripted, Sampling(8), samples=0)
    with pytest.raises(DataError, match="no items"):
        respond([], scripted, Sampling(8))
    unanswerable = Responses([Item([1], "who knows", "t:9")], [[generation("7")]], Sampling(8))
    with pytest.raises(DataError, match="t:9: the reference has no number"):
        grade_responses(unanswerable, count_rows)
    with pytest.raises(ConfigError, match="match 'fuzzy' is unknown"):
        grade_responses(responses(), count_rows, "fuzzy")
    for cutoff in (0, 9):
        with pytest.raises(ConfigError, match=f"cutoff {cutoff} is not within the 1 to 8"):
            cutoff_settings(responses(), [cutoff], spell, count_rows)


def test_items_come_from_question_and_answer_rows(tmp_path: Path):
    tiny_tokenizer_files(tmp_path / "tokenizer")
    renderer = Renderer(load_tokenizer(tmp_path / "tokenizer"))
    task = tmp_path / "task.jsonl"
    task.write_text('{"q": "1+1?", "answer": "<<c>>2"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    config = DataConfig(train=str(task), question_template="Say: {q}", strip_pattern="<<.*?>>")
    [item] = read_items(str(task), config, renderer)
    assert item.prompt == renderer.prompt([{"role": "user", "content": "Say: 1+1?"}])
    assert (item.reference, item.where) == ("2", f"{task}:1")
    task.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match="no row has an answer"):
        read_items(str(task), config, renderer)
    task.write_text('{"messages": [{"role": "assistant", "content": "hi"}]}\n')
    with pytest.raises(DataError, match=r"task\.jsonl:1: the row has no question"):
        read_items(str(task), config, renderer)


def spelled(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def test_the_engine_answers_as_served_with_every_depth_counted():
    model = tiny_model("tah2", 3).eval()
    generate = engine_generate(model, spelled, frozenset({13}), kv_memory_mb=8)
    prompts = [[1, 2, 3, 4], [5, 6], [7], [1, 2, 3, 4]]
    answers = generate(prompts, Sampling(12))
    assert answers == generate(prompts, Sampling(12)) and answers[0] == answers[3]
    assert len({depth for answer in answers for depth in answer.depths}) > 1, "nobody looped"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.prompt_depths) == len(prompt) - 1
        assert len(answer.depths) == len(answer.tokens) <= 12 and answer.text == spelled(answer.tokens)
        assert len(answer.tokens) == 12 or answer.tokens[-1] == 13
        # A token counts with the row that predicted it: the depths of all rows but the last token's, which never runs.
        ran = teacher_forced_depths(model, [*prompt, *answer.tokens])
        assert [*answer.prompt_depths, *answer.depths] == ran[:-1]
        assert decode_flops(model.config, model.method, answer.prompt_depths, answer.depths) > 0


def teacher_forced_depths(model, ids: list[int]) -> list[int]:
    from fathom.evals.forward import routed_trace
    from fathom.model.rows import pack_documents

    return routed_trace(model, pack_documents([(ids, [True] * len(ids))]), 64).executed.tolist()


def test_samples_of_one_prompt_differ_and_repeat_with_the_seed():
    model = tiny_model("tah2", 2).eval()
    generate = engine_generate(model, spelled, frozenset(), kv_memory_mb=8)
    prompts = [[1, 2, 3]] * 4
    first = generate(prompts, Sampling(6, 1.0, seed=3))
    assert len({answer.text for answer in first}) > 1
    assert first == generate(prompts, Sampling(6, 1.0, seed=3)) != generate(prompts, Sampling(6, 1.0, seed=4))
    assert len({seed_of(seed, number) for seed in range(10) for number in range(10)}) == 100


def test_the_dials_reach_the_engine():
    model = tiny_model("tah2", 3).eval()
    generate = engine_generate(model, spelled, frozenset(), kv_memory_mb=8)
    for dials, depths in (((1.0, None), {1}), ((0.0, None), {3}), ((0.0, 2), {2})):
        [answer] = generate([[1, 2, 3]], Sampling(6, threshold=dials[0], max_depth=dials[1]))
        assert set(answer.depths) == depths == set(answer.prompt_depths)


def test_what_the_engine_refuses_is_said_with_the_prompts_number():
    generate = engine_generate(tiny_model("standard").eval(), spelled, frozenset(), kv_memory_mb=8)
    with pytest.raises(ConfigError, match="prompt 2: max_tokens 200"):
        generate([[1], [2] * 100], Sampling(200))
    assert len(generate([[1]], Sampling(3))[0].tokens) == 3, "a refused batch leaves the engine free"


def test_plots_show_the_numbers(tmp_path: Path):
    whole = responses()
    drawn = plot_accuracy(grade_responses(whole, count_rows), tmp_path)
    assert "avg@3 33.3%" in drawn[0].read_text() and "cons@3 33.3%" in drawn[0].read_text()
    curve = accuracy_curve("my model", "cutoff", cutoff_settings(whole, [1, 2, 8], spell, count_rows))
    text = plot_curves([curve], tmp_path, "curve")[0].read_text()
    assert f"my model: slope {curve.slope.value:.3g} per doubling [" in text
    same = accuracy_curve(
        "flat",
        "cutoff",
        [curve_point._replace(flops=[2.0] * 3) for curve_point in cutoff_settings(whole, [2, 8], spell, count_rows)],
    )
    assert plot_curves([same], tmp_path, "flat")[1].read_bytes().startswith(b"\x89PNG")
