"""Messages to ids and back: one BOS, append-only prompts, parsed replies."""

import json
import random

import pytest
from helpers_tokenizer import (
    BOS_CHATML,
    CHATML,
    DROPS_REASONING,
    OPENS_REASONING,
    TOOLS_CHATML,
    tiny_tokenizer,
)

from rollout.types import Turn
from serving_bridge.chat import Chat, ChatError, chat_of, load_chat

USER = {"role": "user", "content": "What is nine minus five?"}


def turn_of(prompt_ids, ids):
    return Turn(tuple(prompt_ids), tuple(ids), (-0.5,) * len(ids), (0,) * len(ids), "stop")


def next_prompt(chat: Chat, ids, *, reply=None, then=({"role": "user", "content": "and now?"},)):
    """The prompt after `ids` answered USER, or None if that is no extension."""
    before = chat.prompt([USER])
    message = chat.parse(ids, before.text) if reply is None else reply
    return chat.extend(turn_of(chat.encode(before.text), ids), before, chat.prompt([USER, message, *then]))


def extend(chat: Chat, ids, **options):
    """The prompt after `ids` answered USER, and the ids it must start with: the prompt then and `ids`."""
    longer, exact = next_prompt(chat, ids, **options), chat.render([USER]) + tuple(ids)
    assert longer is not None
    return longer, exact


def end(chat: Chat) -> int:
    return chat.encode("<|im_end|>")[0]


def test_end_ids_come_from_tokenizer_generation_config_and_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    # 0 is the EOS, 7 is in the generation config, <|im_end|> is what the template closes a turn with.
    assert load_chat(tmp_path).end_ids == (0, 2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_chat(tmp_path).end_ids == (0, 2, 9)
    (tmp_path / "generation_config.json").unlink()
    assert load_chat(tmp_path).end_ids == (0, 2)


def test_loading_says_what_is_missing(tmp_path):
    with pytest.raises(ChatError, match=r"no checkpoint folder at .*nowhere; model\.base"):
        load_chat(tmp_path / "nowhere")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ChatError, match=r"has no chat template; put one into .*chat_template\.jinja"):
        load_chat(tmp_path)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_tpl_01_the_prompt_begins_with_one_bos(adds_bos):
    """The template renders BOS and the tokenizer adds it again."""
    chat = chat_of(tiny_tokenizer(BOS_CHATML, adds_bos=adds_bos))
    bos = chat.tokenizer.bos_token_id
    prompt_ids = chat.render([USER])
    assert (prompt_ids[0], prompt_ids.count(bos)) == (bos, 1)
    longer, exact = extend(chat, (*chat.encode("4"), end(chat)))
    assert longer[: len(exact)] == exact
    assert longer.count(bos) == 1


def test_extension_equals_a_fresh_rendering_where_the_sampled_ids_are_canonical():
    chat = chat_of(tiny_tokenizer())
    longer, _ = extend(chat, (*chat.encode("4"), end(chat)))
    answer = {"role": "assistant", "content": "4"}
    assert longer == chat.render([USER, answer, {"role": "user", "content": "and now?"}])


def test_a_cut_completion_gets_the_whole_end_of_turn():
    chat = chat_of(tiny_tokenizer())
    cut = chat.encode("it is pro")
    longer, exact = extend(chat, cut)
    ended, _ = extend(chat, (*cut, end(chat)))
    assert longer == ended
    assert longer[len(exact)] == end(chat)


def test_another_end_token_than_the_templates_is_kept_and_the_turn_is_closed():
    chat = chat_of(tiny_tokenizer(), end_ids=[0])
    longer, exact = extend(chat, (*chat.encode("4"), 0))
    assert longer[: len(exact)] == exact
    assert chat.decode(longer[len(exact) :]).startswith("<|im_end|>\n<|im_start|>user\n")


def test_tok_01_unusual_ids_survive_being_seen_as_text():
    """Turns were decoded to text and tokenised again; BPE is not one-to-one."""
    chat, draw = chat_of(tiny_tokenizer()), random.Random(0)
    ordinary = range(len(chat.tokenizer) - 1, len(chat.tokenizer) - 301, -1)
    unusual = 0
    for _ in range(300):
        ids = tuple(draw.choices(ordinary, k=draw.randrange(1, 12)))
        unusual += chat.encode(chat.decode(ids)) != ids
        longer, exact = extend(chat, (*ids, end(chat)))
        assert longer[: len(exact)] == exact
    assert unusual > 200


def test_tok_15_special_tokens_inside_a_completion_do_not_shift_the_seam():
    """Text was decoded without special tokens, ids were filtered by another rule, then sliced by length."""
    chat = chat_of(tiny_tokenizer())
    ids = (*chat.encode("before"), 3, end(chat), 0, *chat.encode("after"), end(chat))
    assert chat.parse(ids)["content"] == "before<s><|im_end|><|endoftext|>after"
    longer, exact = extend(chat, ids)
    assert longer[: len(exact)] == exact
    assert chat.decode(longer[len(exact) :]) == "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"


def test_tok_14_dropped_reasoning_starts_a_new_segment_that_holds_the_new_message():
    """The new turn was sliced out of a rendering whose history had changed."""
    chat = chat_of(tiny_tokenizer(DROPS_REASONING))
    ids = (*chat.encode("<think>\nhard\n</think>\n\n4"), end(chat))
    assert next_prompt(chat, ids) is None
    assert next_prompt(chat, (*chat.encode("4"), end(chat))) is not None


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": "5"}, USER],  # another reply than the sampled one
        [{**USER, "content": "What is nine minus four?"}, {"role": "assistant", "content": "4"}, USER],  # another question
        [USER],  # the same question again
        [USER, USER],  # the reply left out
        [USER, {"role": "assistant", "content": "4 or 5"}, USER],
    ],
)
def test_rewritten_history_is_not_an_extension(messages):
    chat = chat_of(tiny_tokenizer())
    before = chat.prompt([USER])
    turn = turn_of(chat.encode(before.text), (*chat.encode("4"), end(chat)))
    assert chat.extend(turn, before, chat.prompt(messages)) is None


def test_tpl_03_reasoning_opened_by_the_prompt_is_read_and_kept():
    """The completion has only the closing tag, and the reasoning ended up outside an empty block."""
    chat = chat_of(tiny_tokenizer(OPENS_REASONING))
    text = chat.prompt([USER]).text
    assert text.endswith("<think>\n")
    ids = (*chat.encode("so 9-5.\n</think>\n\n4"), end(chat))
    message = chat.parse(ids, text)
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "so 9-5."}
    longer, exact = extend(chat, ids)
    assert longer[: len(exact)] == exact
    assert chat.decode(longer).count("so 9-5.") == 1
    without = {"role": "assistant", "content": "4"}  # a client that forgets the reasoning has rewritten history
    assert next_prompt(chat, ids, reply=without) is None


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<think>never closed", "never closed", ""),
        ("no tags", None, "no tags"),
        ("stray </think> tag", None, "stray </think> tag"),
    ],
)
def test_reasoning_is_told_from_content(text, reasoning, content):
    message = chat_of(tiny_tokenizer()).parse(chat_of(tiny_tokenizer()).encode(text))
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


CALL = '<tool_call>\n{"name":"add",  "arguments":{"a":3,"b":5}}\n</tool_call>'


def test_tool_calls_are_read_in_hermes_form_and_their_ids_are_kept_exactly():
    chat = chat_of(tiny_tokenizer(TOOLS_CHATML))
    ids = (*chat.encode(f"I add.\n{CALL}"), end(chat))
    message = chat.parse(ids)
    (call,) = message["tool_calls"]
    assert message["content"] == "I add."
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 5}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "8"}
    longer, exact = extend(chat, ids, then=[result])
    assert longer[: len(exact)] == exact  # although the template prints the call with other spaces
    assert chat.decode(longer[len(exact) :]) == "\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"


def test_tool_call_ids_are_derived_from_the_call_and_differ_between_calls():
    chat = chat_of(tiny_tokenizer())
    ids = chat.encode(CALL + CALL)
    first, second = chat.parse(ids)["tool_calls"]
    assert chat.parse(ids)["tool_calls"] == [first, second]
    later = chat.parse(ids, "another prompt")["tool_calls"]
    assert len({first["id"], second["id"], later[0]["id"], later[1]["id"]}) == 4


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [3]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "argum',
    ],
)
def test_a_block_that_is_no_call_stays_in_the_content(text):
    chat = chat_of(tiny_tokenizer())
    assert chat.parse(chat.encode(text)) == {"role": "assistant", "content": text}


def test_tool_calls_are_left_alone_when_not_asked_for():
    chat = chat_of(tiny_tokenizer())
    assert chat.parse(chat.encode(CALL), tools=False) == {"role": "assistant", "content": CALL}


_CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
_DONE = "{% endfor %}{{ '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (_CALLS + "{{ c.function.arguments | tojson }}" + _DONE, '{"n": 3}'),
        (_CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}" + _DONE, "n=3"),
        (_CALLS + "{{ 'args ' + c.function.arguments }}" + _DONE, 'args {"n": 3}'),
        (_CALLS + "{{ 'args ' ~ c.function.arguments }}" + _DONE, 'args {"n": 3}'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"n": 3}', {"n": 3}])
def test_tpl_04_arguments_are_rendered_once_whatever_the_template_wants(template, shown, arguments):
    """Arguments were encoded twice, iterated letter by letter, or crashed the template."""
    chat = chat_of(tiny_tokenizer(template))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = chat.prompt([USER, {"role": "assistant", "content": None, "tool_calls": [call]}]).text
    assert text == f"{USER['content']}<|im_end|>{shown}<|im_end|>"


def test_content_parts_are_joined_and_null_is_empty():
    chat = chat_of(tiny_tokenizer())
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "nine minus five?"}]
    assert chat.render([{"role": "user", "content": parts}]) == chat.render([USER])
    assert chat.render([{"role": "user", "content": None}]) == chat.render([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "x"}, r"messages\[1\]\.role"),
        ({"role": "user", "content": 3}, r"messages\[1\]\.content is a int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[1\]\.content\[0\]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"messages\[1\]\.tool_calls\[0\]\.function\.name"),
        ({"role": "assistant", "tool_calls": "f"}, r"messages\[1\]\.tool_calls is a str"),
    ],
)
def test_malformed_messages_are_named(message, named):
    with pytest.raises(ChatError, match=named):
        chat_of(tiny_tokenizer()).prompt([USER, message])


def test_what_the_template_refuses_is_an_error_of_the_messages():
    strict = "{% if messages[0].role == 'tool' %}{{ raise_exception('roles must alternate') }}{% endif %}" + CHATML
    with pytest.raises(ChatError, match="refuses messages: roles must alternate"):
        chat_of(tiny_tokenizer(strict)).prompt([{"role": "tool", "content": "x"}])
    with pytest.raises(ChatError, match="messages is empty"):
        chat_of(tiny_tokenizer()).prompt([])
