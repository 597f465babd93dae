"""The OpenAI wire format: request bodies, replies and errors. Unknown request keys are ignored, as every client sends some."""

import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.types import Completion, SamplingParams


class ApiError(Exception):
    """A reply that is not 200: HTTP status, OpenAI `code`, a message for people, the request key at fault if there is one."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param

    def response(self) -> JSONResponse:
        """The error in OpenAI form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None

    @property
    def limit(self) -> int | None:
        """The bound on completion tokens that the request asks for."""
        return self.max_tokens

    def sampling(self, room: int, default: int, choice: int) -> SamplingParams:
        """How choice number `choice` is drawn when nobody but the request governs; at most `room` tokens."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        drawn = secrets.randbits(31) if self.seed is None else self.seed % 2**31
        return SamplingParams(
            max_tokens=min(self.limit or default, room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop=stop,
            key=(drawn, choice),
        )


class ChatRequest(_Body):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def limit(self) -> int | None:
        """The smaller of the two spellings of the bound, where given."""
        return min((bound for bound in (self.max_tokens, self.max_completion_tokens) if bound is not None), default=None)

    @property
    def calls_tools(self) -> bool:
        """Whether the reply may be read as tool calls."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionRequest(_Body):
    """Body of `/v1/completions`: one prompt, as text or as ids."""

    prompt: str | list[int] = Field(min_length=1)


def read_body[T: _Body](model: type[T], raw: bytes) -> T:
    """The request body. Raises `ApiError` 400 naming the first field at fault."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise ApiError(400, "invalid_body", f"{field}: {first['msg']}", field) from error


@dataclass(frozen=True)
class Choice:
    """One sampled completion, the message it shows and the prompt it continues."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    message: Mapping[str, Any]


def chat_reply(
    model: str, created: int, request: ChatRequest, choices: Sequence[Choice], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """A `chat.completion` object; `logprobs` has one entry per sampled token, shown in the message or not."""
    shown = []
    for index, choice in enumerate(choices):
        completion = choice.completion
        called = bool(choice.message.get("tool_calls")) and completion.finish_reason == "stop"
        reason = "tool_calls" if called else completion.finish_reason
        entry: dict[str, Any] = {"index": index, "message": choice.message, "finish_reason": reason, "logprobs": None}
        if request.logprobs:
            entry["logprobs"] = {
                "content": [
                    _token(decode, token, logprob) for token, logprob in zip(completion.ids, completion.logprobs, strict=True)
                ]
            }
        if request.return_token_ids:
            entry["token_ids"] = completion.ids
        shown.append(entry)
    return _reply("chat.completion", "chatcmpl", model, created, request, choices, shown)


def text_reply(
    model: str, created: int, request: CompletionRequest, choices: Sequence[Choice], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """A `text_completion` object."""
    shown = []
    for index, choice in enumerate(choices):
        completion = choice.completion
        text, reason = choice.message["content"], completion.finish_reason
        entry: dict[str, Any] = {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
        # `logprobs: 0` asks for the sampled tokens without alternatives.
        if request.logprobs is not None and request.logprobs is not False:
            tokens = [decode([token]) for token in completion.ids]
            entry["logprobs"] = {"tokens": tokens, "token_logprobs": completion.logprobs, "top_logprobs": None}
        if request.return_token_ids:
            entry["token_ids"] = completion.ids
        shown.append(entry)
    return _reply("text_completion", "cmpl", model, created, request, choices, shown)


async def while_connected(request: Request, work: Coroutine[Any, Any, dict[str, Any]], *, stream: bool = False) -> Response:
    """The reply of `work`. A client that hangs up cancels it, which frees the engine and records nothing."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=499)
        reply = answer.result()
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
    if not stream:
        return JSONResponse(reply)
    return Response(f"data: {json.dumps(_as_chunk(reply))}\n\ndata: [DONE]\n\n", media_type="text/event-stream")


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _as_chunk(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The one chunk that streams `reply` whole."""
    if reply["object"] != "chat.completion":
        return dict(reply)
    choices = []
    for choice in reply["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        choices.append({**{key: value for key, value in choice.items() if key != "message"}, "delta": delta})
    return {**reply, "object": "chat.completion.chunk", "choices": choices}


def _reply(
    kind: str, prefix: str, model: str, created: int, request: _Body, choices: Sequence[Choice], shown: list[dict[str, Any]]
) -> dict[str, Any]:
    prompt, sampled = len(choices[0].prompt_ids), sum(len(choice.completion.ids) for choice in choices)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    reply: dict[str, Any] = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": created, "model": model}
    reply |= {"choices": shown, "usage": usage}
    if request.return_token_ids:
        reply["prompt_token_ids"] = choices[0].prompt_ids
    return reply


def _token(decode: Callable[[Sequence[int]], str], token: int, logprob: float) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
