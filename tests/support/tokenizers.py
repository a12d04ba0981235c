"""Tokenizers of a few hundred tokens, trained on the spot, and chat templates of several habits."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "How many apples does Natalia have now? She has 4 + 8 = 12 apples. The answer is 12.",
    "You are a helpful assistant. Tell me what the answer is and why.",
    "system user assistant tool\n\nthe quick brown fox jumps over the lazy dog",
]
SPECIAL = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}" + CHATML
)
WITH_BOS = "{{ bos_token }}" + CHATML
# As Qwen3 does: earlier turns lose their reasoning, so what was learned is not what a later prompt shows.
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a block that the rendered answer does not have.
THINK_PROMPT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ALTERNATING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
# The generation prompt ends inside a word, so that its last token depends on the answer.
GLUED = CHATML.replace("assistant\n", "assistant: the an").replace("{{ m['role'] }}\n", "{{ m['role'] }}: the an")
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _backend(specials: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(specials), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(
    template: str | None = CHATML,
    specials: tuple[str, ...] = tuple(SPECIAL),
    adds_bos: bool = False,
    **names: Any,
) -> PreTrainedTokenizerFast:
    """A tokenizer with this chat template; ``adds_bos``: a post-processor writes ``<s>`` in front."""
    backend = Tokenizer.from_str(_backend(specials))
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    names = names or {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": "<s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def metaspace_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """As SentencePiece models are: a piece of text tokenised by itself gets a space in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL])
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    made.chat_template = template
    return made
