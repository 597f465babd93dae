"""A server that answers as vLLM 0.32 does wherever the bridge relies on it, with faults to order. Also a program: a fake vLLM.

What it computes is a function of the bytes of the weights that it was sent, so that a test can tell which ones it has.
"""

import asyncio
import hashlib
import json
import os
import signal
import struct
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # as a program it is started with another path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from rollout.server import serve
from serving_bridge.plugin.gspo_vllm.guard import TOKEN, AdminToken
from serving_bridge.plugin.gspo_vllm.wire import receive as pull

BASE, LOST = 1, -1
"""Weights of a fresh server, and of one that woke from a sleep of level 2; others are the crc32 of the tensors' bytes."""
CONFIG: dict[str, Any] = {
    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 512, "dtype": "torch.float32",
                     "quantization": None, "override_generation_config": {}, "logits_processors": None,
                     "enable_sleep_mode": False},
    "scheduler_config": {"enable_chunked_prefill": False},
    "device_config": {"device": "cpu", "device_type": "cpu"},
    "weight_transfer_config": {"backend": "gspo"},
    "lora_config": {"max_lora_rank": 16},
    "speculative_config": None,
}  # fmt: skip
"""The part of /server_info that is read, of a server without fault."""


def score(weights: int, ids: Sequence[int]) -> list[float]:
    """Log-probabilities `[t-1]` of `ids[1:]` under `weights`."""
    return [-4 * _fraction(weights, *ids[: i + 1]) - 0.01 for i in range(1, len(ids))]


def _fraction(*key: int) -> float:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest()) / 2**32


def contents(path: str | Path) -> tuple[int, int]:
    """`(crc32, count)` of the tensors in a safetensors file."""
    data = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return zlib.crc32(data[8 + size :]), len(json.loads(data[8 : 8 + size]).keys() - {"__metadata__"})


@dataclass(eq=False)
class Run:
    """A request: `prefix` are the weights that its prompt was computed with, `tokens` `(id, log-probability)`."""

    model: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    done: "asyncio.Future[str]"
    prefix: int | None = None
    tokens: list[tuple[int, float]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)


class EngineError(Exception):
    """An error of a worker, which vLLM answers with 500."""


class FakeVllm:
    """An ASGI app. `faults[path]` is what the next calls of a path meet, one each; None: nothing.

    An int: that status. A float: that many seconds, then the answer. "hang": no answer. "drop": the connection is closed.
    "lose": so, but after the work is done. "die": the process is killed. "stale": an update is acknowledged and not applied.
    A function: its result is the reply. A pair of an event and a fault: that, after the event. `spoil` changes completions.
    """

    def __init__(self, *, names: Sequence[str] = ("policy",), token_s: float = 0.002, apply_s: float = 0.0):
        self.names, self.token_s, self.apply_s = list(names), token_s, apply_s
        self.config: dict[str, Any] = json.loads(json.dumps(CONFIG))
        self.faults: defaultdict[str, deque[Any]] = defaultdict(deque)
        self.spoil: Callable[[dict[str, Any]], Any] = lambda reply: reply
        self.calls: list[str] = []
        """All that was asked, in order, and "admit" where the prompt of a request is first computed."""
        self.bodies: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.finished: list[Run] = []
        self.hung_up, self.sleeps, self.applied = 0, 0, list[str]()
        self.api = self._routes()
        self.restart()

    def restart(self) -> None:
        """As a process that was started again at the same address."""
        self.close()
        self.version, self.weights, self.last_id = "default", BASE, ""
        self.paused = self.asleep = self.updating = False
        self.adapters: dict[str, int] = {}
        self.cache: dict[tuple[Any, ...], int] = {}
        self.running: list[Run] = []
        self.going, self.worker, self.released = asyncio.Event(), asyncio.Lock(), asyncio.Event()
        self.engine: asyncio.Task[None] | None = None
        self.sleeps = 0
        self.going.set()

    def close(self) -> None:
        """Ends whatever it waits for."""
        if hasattr(self, "running"):
            for run in self.running:
                run.done.cancel()
            self.running.clear()
            self.released.set()
            self.going.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        path, query = scope["path"], scope["query_string"].decode()
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if not path.startswith("/fake"):
            self.calls.append(f"{scope['method']} {path}" + (f"?{query}" if query else ""))
            self.bodies.append((path, json.loads(body) if body else None))
        fault = self.faults[path].popleft() if self.faults[path] else None
        first = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            return next(first, None) or await receive()

        await self._meet(fault, scope, again, send)

    async def _meet(self, fault: Any, scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {"stale": fault == "stale"}
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            await self.released.wait()
        elif fault in ("drop", "lose"):
            if fault == "lose":
                await self.api(scope, receive, _nowhere)
            headers = [(b"content-length", b"9")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})  # short of its length: the server closes the connection
        elif isinstance(fault, int):
            await failure(fault, f"scripted {fault}")(scope, receive, send)
        elif isinstance(fault, float):
            await asyncio.sleep(fault)
            await self.api(scope, receive, send)
        elif isinstance(fault, tuple):
            await fault[0].wait()
            await self._meet(fault[1], scope, receive, send)
        elif callable(fault):
            await JSONResponse(fault())(scope, receive, send)
        else:
            await self.api(scope, receive, send)

    # what it computes

    async def _generate(self, request: Request) -> Any:
        body = await request.json()
        if body["model"] not in [*self.names, *self.adapters]:
            return failure(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        run = Run(body["model"], tuple(body["token_ids"]), body["sampling_params"], asyncio.Future())
        self.running.append(run)
        self.engine = self.engine if self.engine and not self.engine.done() else asyncio.create_task(self._run())
        closed = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({run.done, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done.done():
                self.hung_up += 1
                return PlainTextResponse("")
            if run.done.cancelled():
                return failure(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
            return JSONResponse(self.spoil(self._reply(run, run.done.result())))
        finally:
            closed.cancel()
            if run in self.running:
                self.running.remove(run)

    async def _run(self) -> None:
        while self.running:
            await asyncio.sleep(self.token_s)
            await self.going.wait()
            for run in list(self.running):
                self._step(run)

    def _step(self, run: Run) -> None:
        weights = self.adapters.get(run.model, self.weights)
        if run.prefix is None:
            self.calls.append("admit")
            run.prefix = self.cache.setdefault((run.model, *run.prompt), weights)
        seed = run.params.get("seed", 0)
        place = len(run.tokens)
        key = (weights, seed, *run.prompt, place)
        run.tokens.append((int(1000 * _fraction(*key)), -3 * _fraction(0, *key)))
        run.versions.append(self.version)
        run.weights.append(weights)
        if len(run.tokens) >= run.params["max_tokens"]:
            self._finish(run, "length")

    def _finish(self, run: Run, reason: str) -> None:
        self.running.remove(run)
        if not run.done.done():
            run.done.set_result(reason)
            self.finished.append(run)

    def _reply(self, run: Run, reason: str) -> dict[str, Any]:
        content = [{"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []} for token, logprob in run.tokens]
        starts = [i for i in range(len(run.tokens)) if i == 0 or run.versions[i] != run.versions[i - 1]]
        spans = [
            {"version": run.versions[start], "start": start, "end": end}
            for start, end in zip(starts, [*starts[1:], len(run.tokens)], strict=True)
        ]
        choice = {"index": 0, "token_ids": [token for token, _ in run.tokens], "logprobs": {"content": content},
                  "finish_reason": reason, "weight_versions": spans}  # fmt: skip
        found = score(self.adapters.get(run.model, self.weights), run.prompt)
        rows = [{str(token): {"logprob": x, "rank": 1}} for token, x in zip(run.prompt[1:], found, strict=True)]
        asked = run.params.get("prompt_logprobs") is not None
        return {"choices": [choice], "prompt_logprobs": [None, *rows] if asked else None, "model": run.model}

    # what changes it

    async def _work(self, work: Callable[[], None]) -> Any:
        """In a worker: one thing at a time, and to its end though the client may have gone."""

        async def run() -> Any:
            async with self.worker:
                try:
                    work()
                except Exception as error:
                    return failure(500, f"Call to collective_rpc method failed: {error}")
            return {"message": "done"}

        return await asyncio.shield(asyncio.ensure_future(run()))

    async def _init(self) -> Any:
        return await self._work(lambda: None)

    async def _start(self) -> Any:
        def work() -> None:
            if self.updating:
                raise EngineError("start_weight_update called while a weight update is already active. "
                                  "Call finish_weight_update first.")  # fmt: skip
            self.updating = True

        return await self._work(work)

    async def _update(self, request: Request) -> Any:
        info, stale = (await request.json())["update_info"], request.state.stale

        async def run() -> Any:
            async with self.worker:
                if self.asleep:
                    os._exit(139)  # weights that are not mapped
                if not self.updating:
                    return failure(500, "Call to collective_rpc method failed: "
                                   "start_weight_update must be called before update_weights.")  # fmt: skip
                if info.get("id") != self.last_id:
                    try:
                        await self._apply(info, stale)
                    except Exception as error:
                        self.updating = False
                        return failure(500, f"Call to collective_rpc method failed: {error}")
            return {"message": "Weights updated"}

        return await asyncio.shield(asyncio.ensure_future(run()))

    async def _apply(self, info: dict[str, Any], stale: bool) -> None:
        self.last_id = ""
        if info.get("address"):
            crc, count = await asyncio.to_thread(_pulled, info)
        elif info.get("file"):
            crc, count = contents(info["file"])
        else:
            raise ValueError(f"the trainer's address {info.get('address', '')!r} is not host:port")
        await asyncio.sleep(self.apply_s)
        if count != info["count"] or crc != info.get("crc", crc):
            raise ValueError(f"{count} tensors of crc32 {crc} arrived, the trainer sent {info['count']}")
        self.applied.append(info["id"])
        self.last_id = info["id"]
        self.weights = self.weights if stale else crc

    async def _end(self, request: Request) -> Any:
        version = (await request.json()).get("weight_version")

        def work() -> None:
            if not self.updating:
                raise EngineError("finish_weight_update called without a matching start_weight_update.")
            self.updating = False
            self.version = version or self.version

        return await self._work(work)

    async def _load_adapter(self, request: Request) -> Any:
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.names or (name in self.adapters and not body.get("load_inplace")):
            return failure(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")

        def work() -> None:
            rank = json.loads((folder / "adapter_config.json").read_text())["r"]
            most = self.config["lora_config"]["max_lora_rank"]
            if rank > most:
                raise EngineError(f"LoRA rank {rank} is greater than max_lora_rank {most}.")
            self.adapters[name], _ = contents(folder / "adapter_model.safetensors")
            self.applied.append(str(folder))

        done = await self._work(work)
        return done if isinstance(done, JSONResponse) else PlainTextResponse(f"Success: LoRA adapter '{name}' added.")

    async def _pause(self, mode: str = "abort") -> Any:
        self.paused = True
        self.going.clear()
        if mode == "abort":
            for run in list(self.running):
                self._finish(run, "abort")
        return {"status": "paused"}

    async def _resume(self) -> Any:
        self.paused = False
        self.going.set()
        return {"status": "resumed"}

    async def _reset(self, reset_running_requests: bool = False) -> Any:
        """Blocks of requests that run stay, unless these are to be computed anew."""
        held = [run for run in self.running if run.prefix is not None]
        if held and not reset_running_requests:
            return {"success": False}
        for run in held:
            run.prefix = self.adapters.get(run.model, self.weights)
        self.cache.clear()
        return {"success": True}

    async def _sleep(self, level: int = 1, mode: str = "abort") -> Any:
        await self._pause(mode)
        self.asleep, self.sleeps = level > 0, self.sleeps + 1
        self.weights = LOST if level == 2 else self.weights
        return {"status": "sleeping", "level": level}

    async def _wake(self) -> Any:
        self.asleep = False
        await self._resume()
        return {"status": "awake", "tags": None}

    async def _metrics(self) -> PlainTextResponse:
        lines = [f'vllm:engine_sleep_state{{engine="0",model_name="policy",sleep_state="awake"}} {float(not self.asleep)}']
        if self.sleeps:
            lines.append(f'vllm:sleep_mode_operation_duration_seconds_count{{operation="sleep"}} {float(self.sleeps)}')
        return PlainTextResponse("\n".join([*lines, ""]))

    async def _rename(self, body: dict[str, str]) -> Any:
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    async def _state(self) -> Any:
        """For a test that cannot look: this runs in another process."""
        seeds = [run.params.get("seed") for run in self.finished]
        return {"calls": self.calls, "applied": self.applied, "weights": self.weights, "version": self.version,
                "running": len(self.running), "seeds": seeds}  # fmt: skip

    async def _order(self, body: dict[str, list[Any]]) -> Any:
        for path, faults in body.items():
            self.faults[path].extend(faults)

    def _routes(self) -> FastAPI:
        app = FastAPI()
        posts = {"/pause": self._pause, "/resume": self._resume, "/start_weight_update": self._start,
                 "/update_weights": self._update, "/finish_weight_update": self._end, "/sleep": self._sleep,
                 "/wake_up": self._wake, "/reset_prefix_cache": self._reset, "/update_weight_version": self._rename,
                 "/v1/load_lora_adapter": self._load_adapter, "/inference/v1/generate": self._generate,
                 "/init_weight_transfer_engine": self._init, "/fake": self._order}  # fmt: skip
        gets = {"/health": lambda: PlainTextResponse(""), "/weight_info": lambda: {"weight_version": self.version},
                "/is_paused": lambda: {"is_paused": self.paused}, "/metrics": self._metrics, "/gspo_vllm": dict,
                "/is_sleeping": lambda: {"is_sleeping": self.paused or self.asleep},  # so in vLLM, of a pause, too
                "/get_world_size": lambda: {"world_size": 1}, "/fake": self._state,
                "/server_info": lambda: {"vllm_config": self.config, "vllm_env": {}, "system_env": {}}}  # fmt: skip
        for method, routes in (("POST", posts), ("GET", gets)):
            for path, answer in routes.items():
                plain = answer if iscoroutinefunction(answer) else _later(answer)
                app.add_api_route(path, plain, methods=[method], response_model=None)
        return app


def failure(status: int, message: str, kind: str = "InternalServerError") -> JSONResponse:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


def _pulled(info: dict[str, Any]) -> tuple[int, int]:
    """`(crc32, count)` of the tensors in a trainer's stream."""
    receiver = pull(info["address"], os.environ[TOKEN], info["id"], None, timeout_s=info["timeout_s"])
    crc = count = 0
    for bucket in receiver.buckets():
        for _, array in bucket.views():
            crc, count = zlib.crc32(memoryview(array).cast("B"), crc), count + 1
    return crc, count


def _later(answer: Callable[[], Any]) -> Callable[[], Any]:
    """`answer` for a route: a plain function would be called in another thread."""

    async def wrapped() -> Any:
        return answer()

    return wrapped


async def _nowhere(_: Any) -> None:
    pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def main(arguments: Sequence[str]) -> None:
    """As `python -m vllm.entrypoints.openai.api_server ARGUMENTS`."""
    fake = FakeVllm(names=[arguments[arguments.index("--served-model-name") + 1]], token_s=0.01)
    async with await serve(AdminToken(fake), port=int(arguments[arguments.index("--port") + 1])) as server:
        await server.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
