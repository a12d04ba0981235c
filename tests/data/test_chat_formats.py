"""The named chat formats, and learning of the last turn only: what training shows is what serving shows."""

from pathlib import Path
from typing import Any, get_args

import pytest

from fathom.config.schema import ChatFormat
from fathom.data.chat_formats import FORMATS, save_format
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from support.tokenizers import CHATML, REWRITES, THINK_PROMPT, tiny_tokenizer

LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
NAMES: Any = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
FORMATTED = {
    "chatml": Renderer(tiny_tokenizer(THINK_PROMPT), "chatml"),
    "qwen3": Renderer(tiny_tokenizer(REWRITES), "qwen3"),
    "llama3": Renderer(tiny_tokenizer(None, LLAMA3_TOKENS, **NAMES), "llama3"),
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(*numbers: int) -> dict:
    return {"type": "function", "function": {"name": "add", "arguments": {"of": list(numbers)}}}


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1, and 2 + 2?"}]
WITH_TOOLS = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [call(1, 1), call(2, 2)]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "2 and 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "A sum:", "tool_calls": [call(3, 3)]},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": "6."},
]
TURNS = [message for message in WITH_TOOLS if message["role"] != "tool" and not message.get("tool_calls")]


def learned(renderer: Renderer, messages: list[dict], **more: Any) -> str:
    ids, mask = renderer.render(messages, **more)
    return renderer.tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])


def test_every_name_of_a_recipe_is_a_format() -> None:
    assert set(get_args(ChatFormat)) == FORMATS.keys() == FORMATTED.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_serving_sees_what_training_saw_in_every_turn(name: ChatFormat) -> None:
    """Whatever the tokenizer's own template does: these three have a think prompt, rewritten turns, and none."""
    renderer, tools = FORMATTED[name], None if name == "chatml" else [TOOL]
    messages = TURNS if name == "chatml" else WITH_TOOLS
    ids, mask = renderer.render(messages, tools)
    starts = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
    turns = [number for number in range(len(messages)) if messages[number]["role"] == "assistant"]
    assert len(starts) == len(turns) == (2 if name == "chatml" else 4)
    for number, start in zip(turns, starts, strict=True):
        assert renderer.prompt(messages[:number], tools) == ids[:start]
        stop = next((place for place in range(start, len(mask)) if not mask[place]), len(mask))
        assert ids[stop - 1] in renderer.stop_ids


def test_qwen3_writes_tools_as_its_family_reads_them() -> None:
    renderer = FORMATTED["qwen3"]
    text = renderer.tokenizer.decode(renderer.render(WITH_TOOLS, [TOOL]).ids)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add", ' in system
    assert rest == (
        "<|im_start|>user\n1 + 1, and 2 + 2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"of": [1, 1]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"of": [2, 2]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n2 and 4.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n"
        '<|im_start|>assistant\nA sum:\n<tool_call>\n{"name": "add", "arguments": {"of": [3, 3]}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n6.<|im_end|>"
    )


def test_llama3_writes_its_headers_once_and_tools_as_ipython() -> None:
    renderer = FORMATTED["llama3"]
    assert renderer.tokenizer.decode(renderer.render(TURNS[:3]).ids) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1 + 1, and 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2 and 4.<|eot_id|>"
    )
    text = renderer.tokenizer.decode(renderer.render(WITH_TOOLS[1:], [TOOL]).ids)
    assert text.count("<|start_header_id|>system") == 1 and "<|start_header_id|>ipython<|end_header_id|>\n\n6" in text
    calls = '{"name": "add", "parameters": {"of": [1, 1]}}\n{"name": "add", "parameters": {"of": [2, 2]}}<|eot_id|>'
    assert learned(renderer, WITH_TOOLS, tools=[TOOL]).startswith(calls)


def test_qwen3_keeps_reasoning_where_others_would_lose_it() -> None:
    thought = {"role": "assistant", "content": "2.", "reasoning_content": "1 and 1"}
    assert learned(FORMATTED["qwen3"], [*ASKED, thought]) == "<think>\n1 and 1\n</think>\n\n2.<|im_end|>"
    again = [*ASKED, thought, ASKED[1], {"role": "assistant", "content": "4."}]
    assert learned(FORMATTED["qwen3"], again) == "<think>\n1 and 1\n</think>\n\n2.<|im_end|>4.<|im_end|>"
    with pytest.raises(DataError, match="ignores reasoning_content"):
        FORMATTED["chatml"].render([*ASKED, thought])


def test_a_format_needs_its_control_tokens() -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_format 'llama3' needs the special tokens <\|end_header_id\|>, "):
        Renderer(tiny_tokenizer(CHATML), "llama3")


def test_a_tokenizer_without_a_template_gets_that_of_its_control_tokens() -> None:
    assert Renderer(tiny_tokenizer(None, LLAMA3_TOKENS, **NAMES)).template == FORMATTED["llama3"].template
    assert Renderer(tiny_tokenizer(None)).template == FORMATTED["chatml"].template


def test_the_last_turn_alone_is_learned_on_request() -> None:
    renderer = FORMATTED["qwen3"]
    ids, mask = renderer.render([*WITH_TOOLS, ASKED[1]], [TOOL], "last")
    assert ids == renderer.render(WITH_TOOLS, [TOOL]).ids, "a user turn behind it is not kept"
    prompt = renderer.prompt(WITH_TOOLS[:-1], [TOOL])
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)]) and all(mask[len(prompt) :])
    assert learned(renderer, WITH_TOOLS, tools=[TOOL], supervise="last") == "6.<|im_end|>"
    unasked = [{"role": "assistant", "content": "Hello"}]
    assert not any(renderer.render(unasked, supervise="last").supervised)


def test_a_template_that_rewrites_earlier_turns_can_be_learned_from_the_last() -> None:
    """As Qwen3's own: its history is what serving's prompt shows, and so what training shows."""
    renderer = Renderer(tiny_tokenizer(REWRITES))
    with pytest.raises(DataError, match=r"rewrites earlier turns") as caught:
        renderer.render(TURNS)
    assert "data.supervise to last" in caught.value.remedy
    ids, mask = renderer.render(TURNS, supervise="last")
    assert ids[: mask.index(True)] == renderer.prompt(TURNS[:-1])
    assert learned(renderer, TURNS, supervise="last") == "<think>\n\n</think>\n\n6.<|im_end|>"


def test_a_format_travels_with_the_model(tmp_path: Path) -> None:
    """It wins over the template that the base's tokenizer_config.json has."""
    from fathom.model.folder import load_tokenizer

    tiny_tokenizer(REWRITES).save_pretrained(str(tmp_path))
    save_format("qwen3", tmp_path)
    assert Renderer(load_tokenizer(tmp_path)).digest == FORMATTED["qwen3"].digest
