"""Messages to ids and back. Ids are the truth, text is a view: a prompt only ever grows by ids, it is never tokenised again."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from rollout.types import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any  # transformers takes seconds to import: only when a tokenizer is loaded

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_MESSAGE_KEYS = ("name", "tool_call_id", "reasoning_content")


class ChatError(ValueError):
    """Messages that cannot be rendered: names the message, the field and the constraint."""


@dataclass(frozen=True)
class Prompt:
    """A request as the chat template shows it. `text` ends with the generation prompt."""

    messages: tuple[Mapping[str, Any], ...]
    text: str


@dataclass(frozen=True)
class Chat:
    """A checkpoint's tokenizer and chat template.

    `end_ids` end a turn (sorted). `arguments_as_mapping`: the template wants the arguments of a tool call as a mapping; they
    arrive as a JSON string.
    """

    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    arguments_as_mapping: bool

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> Prompt:
        """The request as text. Raises `ChatError` for messages that are malformed or that the template refuses."""
        normal = tuple(_normalize(message, f"messages[{i}]", self.arguments_as_mapping) for i, message in enumerate(messages))
        if not normal:
            raise ChatError("messages is empty; at least one message is needed")
        return Prompt(normal, _apply_template(self.tokenizer, normal, tools, generation=True))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Prompt ids of a fresh segment, generation prompt included. A BOS is there once, if the template writes it."""
        return self.encode(self.prompt(messages, tools).text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of rendered text. The template has written the special tokens, so the tokenizer adds none."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included: what stop strings are matched against."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def extend(self, turn: Turn, before: Prompt, now: Prompt) -> tuple[int, ...] | None:
        """Prompt ids of `now` that start with `turn`'s prompt and completion exactly, or None if history was rewritten.

        `before` is the request that `turn` answered. Only the text added since is tokenised: the end of the turn as far as it
        was not sampled, the new messages and the generation prompt. It starts at an end-of-turn token, so no merge crosses
        the seam. None means that the template (or the caller) shows another history than the one sampled.
        """
        count = len(before.messages)
        if len(now.messages) <= count or now.messages[count]["role"] != "assistant" or not now.text.startswith(before.text):
            return None
        added, opened = now.text[len(before.text) :], _opens_reasoning(before.text)
        sampled = _canonical(_parse(self._body(turn.completion_ids), opened=opened))
        for position, end_id in self._ends(added):
            if _canonical(_parse(added[:position], opened=opened)) != sampled:
                continue
            ids = self.encode(added[position:])
            if ids[0] != end_id:
                return None
            return turn.prompt_ids + turn.completion_ids + (ids[1:] if turn.completion_ids[-1] == end_id else ids)
        return None

    def parse(self, ids: Sequence[int], prompt_text: str = "", *, tools: bool = True) -> dict[str, Any]:
        """The assistant message, in OpenAI form, that `ids` show: `content`, `reasoning_content`, `tool_calls`.

        `prompt_text` tells whether the reasoning was opened by the generation prompt. `tools`: read Hermes
        `<tool_call>{json}</tool_call>` blocks; a block that is not a call stays in the content.
        """
        text = self._body(ids)
        message = _parse(text, opened=_opens_reasoning(prompt_text), tools=tools)
        for index, call in enumerate(message.get("tool_calls", ())):
            # Templates may render the id, so it is derived, not drawn; nine alphanumerics because some templates insist.
            call["id"] = hashlib.sha256(f"{index}\0{prompt_text}\0{text}".encode()).hexdigest()[:9]
        return message

    def _body(self, ids: Sequence[int]) -> str:
        return self.decode(ids[:-1] if ids and ids[-1] in self.end_ids else ids)

    def _ends(self, text: str) -> Iterator[tuple[int, int]]:
        """Every `(position, end id)` in `text`, from the left."""
        markup = {self.decode([end_id]): end_id for end_id in self.end_ids if end_id < len(self.tokenizer)}
        for match in re.finditer("|".join(map(re.escape, sorted(markup, key=len, reverse=True))), text):
            yield match.start(), markup[match.group()]


def load_chat(folder: Path) -> Chat:
    """The `Chat` of a local checkpoint folder; `end_ids` also from its generation_config.json. Never asks the network.

    Raises `ChatError` if the tokenizer cannot be read, or has no chat template or no end-of-turn token.
    """
    if not folder.is_dir():
        raise ChatError(f"no checkpoint folder at {folder}; model.base must resolve to a local folder with tokenizer files")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would complain that torch is missing
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(" :")
        raise ChatError(f"no tokenizer can be read from {folder} ({reason}); it needs an intact tokenizer.json") from None
    if not tokenizer.chat_template:
        raise ChatError(f"the tokenizer at {folder} has no chat template; put one into {folder}/chat_template.jinja")
    config = folder / "generation_config.json"
    stored = json.loads(config.read_text()).get("eos_token_id") if config.exists() else None
    return chat_of(tokenizer, stored if isinstance(stored, list) else [] if stored is None else [stored])


def chat_of(tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int] = ()) -> Chat:
    """The `Chat` of a tokenizer. Ends of turn: `end_ids`, the tokenizer's EOS and the token the template closes a turn with."""
    found = set(end_ids)
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    question = {"role": "user", "content": "a"}
    shown = _apply_template(tokenizer, [question, {"role": "assistant", "content": "probe-0"}], None, generation=False)
    closing = tokenizer.encode(shown.rpartition("probe-0")[2], add_special_tokens=False)
    if closing and closing[0] in tokenizer.added_tokens_decoder:
        found.add(closing[0])
    if not found:
        raise ChatError("the tokenizer names no end-of-turn token; set eos_token_id in generation_config.json")
    return Chat(tokenizer, tuple(sorted(found)), _wants_mapping(tokenizer, question))


def _wants_mapping(tokenizer: PreTrainedTokenizerBase, question: Mapping[str, Any]) -> bool:
    """False where the template fails on a mapping or prints it as Python: it wants the JSON string."""
    call = {"id": "a00000000", "type": "function", "function": {"name": "f", "arguments": {"probe": 3}}}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return "{'probe'" not in _apply_template(tokenizer, messages, None, generation=False)
    except ChatError:
        return False


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    generation: bool,
) -> str:
    given = None if tools is None else [dict(tool) for tool in tools]
    conversation = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tools=given, add_generation_prompt=generation, tokenize=False)  # type: ignore[arg-type]
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ChatError(f"the chat template refuses messages: {error}") from error
    return str(text)


def _normalize(message: Mapping[str, Any], name: str, as_mapping: bool) -> dict[str, Any]:
    """`message` as templates expect it: text content, arguments of tool calls as a mapping or as JSON."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError(f"{name}.role is {role!r}; it must be a string such as 'user'")
    normal: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"{name}.content")}
    normal |= {key: message[key] for key in _MESSAGE_KEYS if isinstance(message.get(key), str)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatError(f"{name}.tool_calls is a {type(calls).__name__}; it must be a list")
    if calls:
        normal["tool_calls"] = [_call(call, f"{name}.tool_calls[{i}]", as_mapping) for i, call in enumerate(calls)]
    return normal


def _text(content: Any, name: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ChatError(f"{name} is a {type(content).__name__}; it must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ChatError(f'{name}[{i}] is not {{"type": "text", "text": ...}}; only text parts are understood')
        texts.append(text)
    return "".join(texts)


def _call(call: Any, name: str, as_mapping: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{name}.function.name is missing; a tool call names its function")
    arguments = function.get("arguments", {})
    if as_mapping and isinstance(arguments, str):
        parsed = _json_object(arguments or "{}")
        arguments = arguments if parsed is None else parsed
    elif not as_mapping and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _opens_reasoning(prompt_text: str) -> bool:
    return prompt_text.rstrip().endswith("<think>")


def _parse(text: str, *, opened: bool, tools: bool = True) -> dict[str, Any]:
    """The message in `text`, ids of tool calls left empty."""
    reasoning = None
    if opened or text.lstrip().startswith("<think>"):
        thought, closed, rest = text.partition("</think>")
        reasoning = thought.lstrip().removeprefix("<think>").strip("\n")
        text = rest.lstrip("\n") if closed else ""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        value = _json_object(match[1]) or {}
        arguments = value.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json_object(arguments)
        if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
            return match[0]
        function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": "", "type": "function", "function": function})
        return ""

    visible = _TOOL_CALL.sub(take, text) if tools else text
    message: dict[str, Any] = {"role": "assistant", "content": (visible.strip() or None) if calls else visible}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _canonical(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two renderings of one reply share: spacing and the layout of JSON may differ."""
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
    return (message.get("reasoning_content") or "").strip(), (message["content"] or "").strip(), calls
