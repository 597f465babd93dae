"""The OpenAI-compatible front of an engine. Each attempt has a private URL; what is sampled behind it is recorded as turns.

A trace is an attempt at one episode. Its URL is its only key: no header is checked, because task apps send whatever they have.
"""

import asyncio
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rollout.types import Completion, SamplingParams, Turn
from serving_bridge.chat import Chat, ChatError, Prompt
from serving_bridge.openai_api import (
    ApiError,
    ChatRequest,
    Choice,
    CompletionRequest,
    chat_reply,
    read_body,
    text_reply,
    while_connected,
)

_TRACE_ID = re.compile(r"trace_[0-9a-f]{32}")


@dataclass
class _Trace:
    sampling: SamplingParams
    turns: list[Turn] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    in_flight: asyncio.Future[Completion] | None = None
    closed: bool = False
    broken: bool = False
    failure: str | None = None
    overflow: str | None = None


class Gateway:
    """Renders messages to ids, samples, records. Implements `rollout.types.Recorder`; `sample` is a `rollout.types.Sample`.

    `context_length`: tokens of prompt and completion together. `timeout_s`: seconds that one sampling call may take.
    `base_url`: where `build_gateway_app(gateway)` is served, set once that is known. Use it from the thread that serves it.
    """

    def __init__(
        self,
        sample: Callable[[Sequence[int], SamplingParams], Awaitable[Completion]],
        chat: Chat,
        *,
        model: str,
        context_length: int,
        timeout_s: float,
        base_url: str = "",
        clock: Callable[[], float] = time.time,
    ):
        self.model, self.context_length, self.base_url = model, context_length, base_url
        self._sample, self._chat, self._timeout_s, self._clock = sample, chat, timeout_s, clock
        self._traces: dict[str, _Trace] = {}

    def open(self, sampling: SamplingParams) -> tuple[str, str]:
        """A new attempt: `(trace_id, inference_url)`. Turn k of it is sampled with `sampling`, its key ending in k."""
        if not self.base_url:
            raise RuntimeError("the gateway has no base_url; serve its app and set gateway.base_url before opening a trace")
        trace_id = f"trace_{secrets.token_hex(16)}"
        self._traces[trace_id] = _Trace(sampling)
        return trace_id, f"{self.base_url.rstrip('/')}/t/{trace_id}/v1/chat/completions?cid={trace_id}"

    def close(self, trace_id: str) -> tuple[Turn, ...]:
        """The turns recorded so far, in call order. A call in flight is cancelled, not recorded. Raises KeyError if unknown."""
        trace = self._traces.pop(trace_id)
        trace.closed = True
        if trace.in_flight is not None:
            trace.in_flight.cancel()
        return tuple(trace.turns)

    def failure(self, trace_id: str) -> str | None:
        """Why the latest call of an open trace got no completion, or None: infrastructure failed, the attempt has no reward."""
        return self._traces[trace_id].failure

    def overflow(self, trace_id: str) -> str | None:
        """The message of the context_length_exceeded reply that an open trace got, or None: the attempt was cut, not broken."""
        return self._traces[trace_id].overflow

    async def traced_chat(self, trace_id: str, request: ChatRequest) -> dict[str, Any]:
        """The reply to one call of a trace, recorded as its next turn. Calls of one trace run one after another."""
        trace = self._find(trace_id)
        if (request.n or 1) > 1:
            raise ApiError(400, "unsupported_value", f"n is {request.n}; a traced call returns 1 choice: one turn", "n")
        if request.stream:
            raise ApiError(400, "unsupported_value", "stream is true; a traced call is answered whole: omit stream", "stream")
        async with trace.lock:
            self._find(trace_id)
            if trace.broken:
                raise ApiError(502, "engine_error", f"this trace is void: {trace.failure}")
            choice = await self._turn(trace, self._prompt(request), request)
        return chat_reply(self.model, int(self._clock()), request, [choice], self._chat.decode)

    async def chat(self, request: ChatRequest) -> dict[str, Any]:
        """The current policy's reply to an untraced request; nothing is recorded."""
        prompt = self._prompt(request)
        ids = self._chat.encode(prompt.text)
        choices = [
            Choice(ids, completion, self._chat.parse(completion.ids, prompt.text, tools=request.calls_tools))
            for completion in await self._draw(ids, request, self.context_length)
        ]
        return chat_reply(self.model, int(self._clock()), request, choices, self._chat.decode)

    async def complete(self, request: CompletionRequest) -> dict[str, Any]:
        """The current policy's continuation of a text, or of ids; nothing is recorded."""
        tokenizer = self._chat.tokenizer
        ids = tuple(tokenizer.encode(request.prompt)) if isinstance(request.prompt, str) else tuple(request.prompt)
        outside = next((token for token in ids if not 0 <= token < len(tokenizer)), None)
        if outside is not None:
            raise ApiError(400, "invalid_body", f"prompt holds id {outside}; ids are 0 to {len(tokenizer) - 1}", "prompt")
        choices = [
            Choice(ids, completion, {"content": self._chat.parse(completion.ids, tools=False)["content"]})
            for completion in await self._draw(ids, request, 16)
        ]
        return text_reply(self.model, int(self._clock()), request, choices, self._chat.decode)

    async def _turn(self, trace: _Trace, prompt: Prompt, request: ChatRequest) -> Choice:
        # A retried call leaves a turn that its successor does not continue, hence the search beyond the latest.
        pairs = reversed(list(zip(trace.turns, trace.prompts, strict=True)))
        extended = (self._chat.extend(turn, before, prompt) for turn, before in pairs)
        ids = next((ids for ids in extended if ids is not None), None) or self._chat.encode(prompt.text)
        try:
            room = self._room(ids)
        except ApiError as error:
            trace.overflow = error.message
            raise
        bound = min(trace.sampling.max_tokens, request.limit or room, room)
        stop_ids = tuple(sorted({*trace.sampling.stop_ids, *self._chat.end_ids}))
        key = (*trace.sampling.key, len(trace.turns))
        completion = await self._engine(ids, replace(trace.sampling, max_tokens=bound, stop_ids=stop_ids, key=key), trace)
        message = self._chat.parse(completion.ids, prompt.text, tools=request.calls_tools)
        recorded = (completion.ids, completion.logprobs, completion.versions, completion.finish_reason)
        trace.turns.append(Turn(ids, *recorded, messages=(*request.messages, message), experts=completion.experts))
        trace.prompts.append(prompt)
        trace.failure = None
        return Choice(ids, completion, message)

    async def _draw(self, ids: tuple[int, ...], request: ChatRequest | CompletionRequest, default: int) -> list[Completion]:
        room = self._room(ids)
        params = [request.sampling(room, default, choice) for choice in range(request.n or 1)]
        calls = [self._engine(ids, replace(drawn, stop_ids=self._chat.end_ids)) for drawn in params]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _engine(self, ids: tuple[int, ...], params: SamplingParams, trace: _Trace | None = None) -> Completion:
        """One checked sampling call under a deadline; `trace` keeps what went wrong."""
        call = asyncio.ensure_future(self._sample(ids, params))
        if trace is not None:
            trace.in_flight = call
        try:
            async with asyncio.timeout(self._timeout_s):
                completion = await call
        except asyncio.CancelledError:
            if trace is not None and trace.closed:
                raise _unknown_trace() from None
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise _failed(trace, 502, "engine_error", "the engine cancelled the call") from None
        except TimeoutError as error:
            raise _failed(trace, 504, "timeout", f"no completion within rollout.timeout_s = {self._timeout_s:g} s") from error
        except Exception as error:
            raise _failed(trace, 502, "engine_error", f"the engine failed: {type(error).__name__}: {error}") from error
        if trace is not None and trace.closed:
            raise _unknown_trace()
        if fault := _fault(completion):
            if trace is not None:
                trace.broken = True
            raise _failed(trace, 502, "invalid_completion", fault)
        return completion

    def _find(self, trace_id: str) -> _Trace:
        if not _TRACE_ID.fullmatch(trace_id) or trace_id not in self._traces:
            raise _unknown_trace()
        return self._traces[trace_id]

    def _prompt(self, request: ChatRequest) -> Prompt:
        try:
            return self._chat.prompt(request.messages, request.tools)
        except ChatError as error:
            raise ApiError(400, "invalid_messages", str(error), "messages") from error

    def _room(self, ids: Sequence[int]) -> int:
        if len(ids) < self.context_length:
            return self.context_length - len(ids)
        most = f"serving.context_length = {self.context_length}"
        message = f"the prompt has {len(ids)} tokens; with one sampled token it exceeds {most}"
        raise ApiError(400, "context_length_exceeded", message, "messages")


def build_gateway_app(gateway: Gateway) -> FastAPI:
    """The HTTP face of `gateway`: a route per trace whatever its client appends, and plain OpenAI routes for everyone else."""
    app = FastAPI(title="gspo-jax gateway", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "model": gateway.model}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": gateway.model, "object": "model", "owned_by": "gspo-jax", "max_model_len": gateway.context_length}
        return {"object": "list", "data": [entry]}

    @app.post("/t/{trace_id}/{rest:path}")
    async def traced(trace_id: str, request: Request) -> Response:
        body = read_body(ChatRequest, await request.body())
        return await while_connected(request, gateway.traced_chat(trace_id, body))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = read_body(ChatRequest, await request.body())
        cid = request.query_params.get("cid")
        if cid is not None:
            # A client that appends to the URL without knowing of queries leaves `?cid=trace_x/v1/chat/completions`.
            return await while_connected(request, gateway.traced_chat(cid.partition("/")[0], body))
        return await while_connected(request, gateway.chat(body), stream=bool(body.stream))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = read_body(CompletionRequest, await request.body())
        return await while_connected(request, gateway.complete(body), stream=bool(body.stream))

    return app


def _fault(completion: Completion) -> str | None:
    """What makes a completion unfit for training, or None."""
    ids, logprobs, versions = len(completion.ids), len(completion.logprobs), len(completion.versions)
    if not ids:
        return "the engine returned no token; a completion has at least one"
    if not ids == logprobs == versions:
        return f"the engine returned {ids} ids, {logprobs} logprobs and {versions} versions; each token has one of each"
    position = next((i for i, logprob in enumerate(completion.logprobs) if not math.isfinite(logprob)), None)
    if position is None:
        return None
    return f"the engine returned logprob {completion.logprobs[position]} at token {position} of {ids}; it must be finite"


def _failed(trace: _Trace | None, status: int, code: str, message: str) -> ApiError:
    if trace is not None:
        trace.failure = message
    return ApiError(status, code, message)


def _unknown_trace() -> ApiError:
    return ApiError(404, "unknown_trace", "no open trace has this id: it is closed, or it is not one that was handed out")
