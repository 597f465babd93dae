"""A small real tokenizer, made in milliseconds: byte-level BPE with ChatML markup, and templates like the known ones."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "The policy answers a question and the task app grades the answer.",
    "unbelievable believable believe able under until understanding standing",
    'call the tool with {"name": "add", "arguments": {"a": 3, "b": 5}} and think about the result',
    "system user assistant You are a helpful assistant. What is nine minus five? so 9-5 is 4",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS_CHATML = "{{ bos_token }}" + CHATML
TOOLS_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    '{% for call in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like Qwen's: calls are printed with `tojson`, so the model's own spacing of the JSON is not reproduced."""
DROPS_REASONING = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'"
    " + message['content'].split('</think>')[-1].lstrip('\n') + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS_REASONING = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message.role == 'assistant' %}{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def tiny_tokenizer(template: str = CHATML, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Every byte is a token, so any text encodes; `adds_bos` puts `<s>` before whatever is encoded with special tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS * 4, trainer)
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer
