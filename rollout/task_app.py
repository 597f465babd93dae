"""Task(prompt, reward) or Env(reset, step) -> an HTTP task app. `python -m rollout.task_app FILE.py [--port N]` serves one.

It calls the policy as any OpenAI client would and knows nothing of tokens; its replies satisfy every known reader.
"""

import argparse
import asyncio
import hmac
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse

from rollout.client import DIRECT, KEEP_ALIVE_S
from rollout.episode import RolloutRequest, play_request
from rollout.server import serve
from rollout.task import AppError, Choice, Env, Message, Messages, Task, as_env
from rollout.task_file import TaskFileError, load_task_file

__all__ = ["AppError", "Choice", "Env", "Message", "Messages", "Task", "TaskFileError", "build_app", "load_task_file", "main"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class _Service:
    name: str
    envs: Mapping[str, Env]
    by_name: bool
    api_keys: tuple[str, ...]

    def find(self, name: str | None) -> tuple[str, Env]:
        if not self.by_name or (name is None and len(self.envs) == 1):
            return next(iter(self.envs.items()))
        if name is None or name not in self.envs:
            known = ", ".join(sorted(self.envs))
            raise AppError(404, "unknown_env", f"env.env_name={name!r} is not served here; known: {known}")
        return name, self.envs[name]


def build_app(task: Task | Env | Mapping[str, Task | Env], api_keys: tuple[str, ...] = ()) -> FastAPI:
    """The FastAPI app of one task, or of several that `env.env_name` selects from. Without `api_keys` it is open to all.

    A single task answers whatever `env.env_name` says. Raises ValueError for an empty mapping or an empty key.
    """
    if not all(api_keys):
        raise ValueError("api_keys holds an empty key; pass () to serve without a key")
    tasks = task if isinstance(task, Mapping) else {task.name: task}
    if not tasks:
        raise ValueError("build_app got no task; give a Task, an Env or a mapping of names to them")
    envs = {name: as_env(item) if isinstance(item, Task) else item for name, item in tasks.items()}
    name = next(iter(envs)) if len(envs) == 1 else "tasks"
    app = FastAPI(lifespan=_lifespan, openapi_url=None)
    app.state.service = _Service(name, envs, isinstance(task, Mapping), api_keys)
    app.add_exception_handler(AppError, _on_app_error)
    app.add_api_route("/", _root, methods=["GET", "HEAD"])
    router = APIRouter(dependencies=[Depends(_check_key)])
    router.add_api_route("/health", _health)
    router.add_api_route("/info", _info)
    router.add_api_route("/task_info", _task_info)
    router.add_api_route("/rollout", _rollout, methods=["POST"])
    router.add_api_route("/done", _done, methods=["POST"])
    app.include_router(router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_ALIVE_S)
    async with httpx.AsyncClient(limits=limits, mounts=DIRECT) as http:
        app.state.http = http
        yield


async def _check_key(request: Request) -> None:
    keys = _service(request).api_keys
    if keys and not any(hmac.compare_digest(sent.encode(), key.encode()) for sent in _sent_keys(request) for key in keys):
        raise AppError(400, "unauthorised", "API key missing or invalid")


async def _on_app_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, AppError):
        raise error
    message = str(error)
    for key in _service(request).api_keys:
        message = message.replace(key, "***")
    body = {"code": error.code, "message": message[:1000], "retryable": error.retryable}
    return JSONResponse({"detail": {"error": body}}, status_code=error.status)


async def _root(request: Request) -> dict[str, Any]:
    return {"status": "ok", "service": _service(request).name}


async def _health(request: Request) -> dict[str, Any]:
    return {"healthy": True, "auth": {"required": bool(_service(request).api_keys)}}


async def _info(request: Request) -> dict[str, Any]:
    service = _service(request)
    return {"service": {"task": service.name}, "tasks": sorted(service.envs)}


async def _task_info(
    request: Request,
    seed: Annotated[list[int] | None, Query()] = None,
    seeds: Annotated[list[int] | None, Query()] = None,
    env_name: str | None = None,
) -> JSONResponse:
    service = _service(request)
    asked = [*(seed or []), *(seeds or [])]
    if not asked and env_name is None and len(service.envs) > 1:
        tasks = {name: _taskset(name, env) for name, env in service.envs.items()}
        return JSONResponse({"taskset": {"id": service.name, "tasks": tasks}})
    name, env = service.find(env_name)
    if not asked:
        return JSONResponse({"taskset": _taskset(name, env)})
    described = [_describe(name, env, index) for index in asked]
    return JSONResponse(described[0] if len(described) == 1 else described)


async def _rollout(body: RolloutRequest, request: Request) -> JSONResponse:
    name, env = _service(request).find(body.env.env_name)
    episode = play_request(request.app.state.http, name, env, body)
    return JSONResponse(await _while_connected(request, episode))


async def _done(request: Request) -> dict[str, Any]:
    return {"ok": True, "service": _service(request).name}


async def _while_connected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The result of `work`, which is cancelled when the caller hangs up: nobody generates for a client that has gone."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise AppError(499, "client_gone", "the caller closed the connection")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _service(request: Request) -> _Service:
    return request.app.state.service


def _sent_keys(request: Request) -> list[str]:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    listed = request.headers.get("x-api-keys", "").split(",")
    sent = [request.headers.get("x-api-key", ""), *listed, token if kind.lower() == "bearer" else ""]
    return [key.strip() for key in sent if key.strip()]


def _taskset(name: str, env: Env) -> dict[str, Any]:
    sizes = dict(env.splits or {})
    return {"id": name, "splits": list(sizes), "sizes": sizes}


def _describe(name: str, env: Env, seed: int) -> dict[str, Any]:
    splits = list(env.splits or {})
    return {
        "task": {"id": name, "name": name},
        "dataset": {"id": name, "splits": splits, "default_split": splits[0] if splits else None, "index": seed},
        "inference": {},
        "limits": {},
        "environment": name,
        "task_metadata": {},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of serving a task file until interrupted: 0, or 2 when it cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m rollout.task_app", description="Serve a task file over HTTP.")
    parser.add_argument("path", help="Python file that defines `task` (Task or Env) or `app` (FastAPI)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="0 picks a free one (default: %(default)s)")
    arguments = parser.parse_args(argv)
    listed = f"{os.environ.get('ENVIRONMENT_API_KEY', '')},{os.environ.get('ENVIRONMENT_API_KEY_ALIASES', '')}"
    keys = tuple(key.strip() for key in listed.split(",") if key.strip())
    try:
        loaded = load_task_file(arguments.path)
        if not isinstance(loaded, FastAPI) and not keys and arguments.host not in _LOOPBACK:
            raise TaskFileError(f"--host {arguments.host} is open to others: set ENVIRONMENT_API_KEY to the key they must send")
        app = loaded if isinstance(loaded, FastAPI) else build_app(loaded, keys)
        asyncio.run(_serve_forever(app, arguments.host, arguments.port))
    except (TaskFileError, OSError, RuntimeError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _serve_forever(app: FastAPI, host: str, port: int) -> None:
    async with await serve(app, host, port) as server:
        print(f"task app: {server.url}", flush=True)
        await server.wait()


if __name__ == "__main__":
    from rollout.task_app import main as run  # the module that task files import, not this second copy of it

    sys.exit(run())
