"""Scripted fakes on real loopback sockets: a policy behind recorded URLs, and the smallest task app."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rollout.types import SamplingParams, Turn

Script = Callable[[str, int, Mapping[str, Any]], Any]


class FakePolicy:
    """A Recorder and its HTTP server in one. `script(trace_id, turn, body)` gives a text, a pair (text, finish_reason), an int
    status to fail with, or a whole response; it may be async."""

    def __init__(self, script: Script):
        self.script = script
        self.url = ""
        self.opened: list[tuple[str, SamplingParams]] = []
        self.closed: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.turns: dict[str, list[Turn]] = {}
        self.running = 0
        self.failures: dict[str, str] = {}
        self.overflows: dict[str, str] = {}
        self.app = FastAPI()
        self.app.add_api_route("/t/{trace_id}/{rest:path}", self._answer, methods=["POST"])

    def open(self, sampling: SamplingParams) -> tuple[str, str]:
        trace_id = f"trace_{len(self.opened):04d}"
        self.opened.append((trace_id, sampling))
        self.turns[trace_id] = []
        return trace_id, f"{self.url}/t/{trace_id}/v1/chat/completions?cid={trace_id}"

    def close(self, trace_id: str) -> tuple[Turn, ...]:
        self.closed.append(trace_id)
        return tuple(self.turns.pop(trace_id))

    def failure(self, trace_id: str) -> str | None:
        return self.failures.get(trace_id)

    def overflow(self, trace_id: str) -> str | None:
        return self.overflows.get(trace_id)

    async def _answer(self, trace_id: str, rest: str, request: Request) -> JSONResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        try:
            turn = len(self.turns.get(trace_id, ()))
            said = self.script(trace_id, turn, body)
            said = await said if asyncio.iscoroutine(said) else said
        finally:
            self.running -= 1
        if isinstance(said, JSONResponse):
            return said
        if isinstance(said, int):
            if said >= 500:
                self.failures[trace_id] = f"scripted {said}"
            return JSONResponse({"error": {"code": "scripted", "message": "scripted failure"}}, status_code=said)
        self.failures.pop(trace_id, None)
        text, finish = said if isinstance(said, tuple) else (said, "stop")
        ids = tuple(text.encode())
        record = Turn((1, 2), ids, (-0.5,) * len(ids), (0,) * len(ids), finish)
        self.turns.setdefault(trace_id, []).append(record)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        return JSONResponse({"choices": [choice], "usage": {}})


def hand_written(answer: Callable[[dict[str, Any]], Any]) -> FastAPI:
    """A task app with nothing but POST /rollout, whose response is `answer(request)` (may be async)."""
    app = FastAPI()

    @app.post("/rollout")
    async def rollout(request: Request) -> Any:
        said = answer(await request.json())
        return await said if asyncio.iscoroutine(said) else said

    return app
