"""Chat templates for tokenizers that have none of their own, or whose own one cannot be trained on.

Each writes an assistant turn as its generation prompt, then what the model says, then a special token that ends the
turn; what is written of a turn never depends on the turns behind it. So what training shows is what serving shows, in
every turn. Control tokens and their order are those of the model family; how tools are introduced is worded here.
"""

from pathlib import Path

from fathom.config.schema import ChatFormat

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Unlike Qwen3's own template it keeps the reasoning of earlier turns and never opens an empty block for it.
QWEN3 = (
    "{% set introduced = messages[0]['role'] in ['system', 'developer'] %}"
    "{% if tools or introduced %}<|im_start|>system\n"
    "{% if introduced %}{{ messages[0]['content'] }}{% endif %}"
    "{% if tools %}{{ '\n\n' if introduced }}# Tools\n\nFunctions that you may call, one JSON schema a line:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}</tools>\n\n"
    "Call a function with a JSON object of its name and arguments:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <arguments>}\n</tool_call>{% endif %}'
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ message['content'] }}{{ '\n' }}</tool_response>"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% if message['reasoning_content'] %}<think>\n{{ message['reasoning_content'] }}{{ '\n' }}</think>\n\n{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n' if message['content'] or not loop.first }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\n' }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif not (loop.first and introduced) %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% set introduced = messages[0]['role'] in ['system', 'developer'] %}"
    "{% if tools or introduced %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if introduced %}{{ messages[0]['content'] }}{% endif %}"
    "{% if tools %}{{ '\n\n' if introduced }}Functions that you may call, one JSON schema a line:\n"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    '\nCall a function with {"name": <function-name>, "parameters": <arguments>} and nothing else.{% endif %}'
    "<|eot_id|>{% endif %}"
    "{% for message in messages %}{% if not (loop.first and introduced) %}"
    "<|start_header_id|>{{ 'ipython' if message['role'] == 'tool' else message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n' if message['content'] or not loop.first }}"
    '{"name": {{ call.function.name | tojson }}, "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PLAIN = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)

FORMATS: dict[ChatFormat, tuple[str, frozenset[str]]] = {
    "chatml": (CHATML, frozenset({"<|im_start|>", "<|im_end|>"})),
    "qwen3": (QWEN3, frozenset({"<|im_start|>", "<|im_end|>"})),
    "llama3": (LLAMA3, frozenset({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"})),
}
"""By name: the template, and the control tokens that it needs in the vocabulary."""


def save_format(name: ChatFormat, folder: Path) -> None:
    """Make a format the chat template of a model folder, for serving and ``transformers``."""
    (folder / "chat_template.jinja").write_text(FORMATS[name][0], encoding="utf-8")
