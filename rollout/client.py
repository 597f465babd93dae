"""Speaks to any task app over HTTP: health, task_info, rollout. What a reply means is in replies.py."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rollout.replies import error_of
from rollout.types import Problem, SamplingParams

KEEP_ALIVE_S = 15.0
CONNECT_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 30.0
DIRECT: Mapping[str, None] = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""httpx mounts: loopback is never reached through a proxy of the environment."""
_REASONS = {
    401: "unauthorised",
    403: "unauthorised",
    404: "not_found",
    408: "timeout",
    425: "rate_limited",
    429: "rate_limited",
}
_RETRYABLE = (408, 425, 429)


class TaskAppError(Exception):
    """A call of the task app failed. `reason` is short and stable, `status` the HTTP status if there was one.

    Reasons: unauthorised | not_found | invalid_request | rate_limited | server_error | timeout | unreachable | disconnected |
    redirect | not_json | unhealthy. `retryable` is true for transport failures, timeouts, 408, 425, 429 and 5xx, unless the
    app's error body says otherwise.
    """

    def __init__(self, reason: str, message: str, *, retryable: bool = False, status: int | None = None):
        super().__init__(message)
        self.reason, self.retryable, self.status = reason, retryable, status


class TaskApp:
    """An open connection to one task app; see `connect_task_app`."""

    def __init__(self, http: httpx.AsyncClient, timeout_s: float, secrets: tuple[str, ...], probe_timeout_s: float):
        self._http, self._timeout_s, self._secrets, self._probe_timeout_s = http, timeout_s, secrets, probe_timeout_s
        url = http.base_url
        self.address = f"{url.scheme}://{url.host}" + (f":{url.port}" if url.port else "")

    async def health(self) -> object:
        """The JSON of GET /health. A 200 does not prove the key. Raises TaskAppError."""
        return await self._call("GET", "health", self._probe_timeout_s)

    async def task_info(self, seed: int | None = None, env_name: str | None = None) -> object:
        """The JSON of GET /task_info: the task set without a seed, one problem's description with one. Raises TaskAppError."""
        query = {name: value for name, value in (("seed", seed), ("env_name", env_name)) if value is not None}
        return await self._call("GET", "task_info", self._probe_timeout_s, params=query)

    async def rollout(self, request: Mapping[str, Any]) -> object:
        """The JSON of POST /rollout, not interpreted, within `timeout_s`. Raises TaskAppError."""
        return await self._call("POST", "rollout", self._timeout_s, json=request)

    async def _call(self, method: str, path: str, timeout_s: float, **content: Any) -> object:
        what = f"{method} /{path} of the task app at {self.address}"
        timeouts = httpx.Timeout(connect=CONNECT_TIMEOUT_S, pool=timeout_s, read=timeout_s, write=WRITE_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):  # httpx counts from byte to byte; this counts the whole call
                response = await self._http.request(method, path, timeout=timeouts, **content)
        except httpx.ConnectTimeout as exc:
            raise TaskAppError("unreachable", f"{what}: no connection within {CONNECT_TIMEOUT_S:g} s", retryable=True) from exc
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise TaskAppError("timeout", f"{what}: no answer within {timeout_s:g} s", retryable=True) from exc
        except httpx.ConnectError as exc:
            raise TaskAppError("unreachable", f"{what}: {self._clean(exc)}", retryable=True) from exc
        except httpx.TransportError as exc:
            raise TaskAppError("disconnected", f"{what}: {type(exc).__name__}: {self._clean(exc)}", retryable=True) from exc
        except httpx.TooManyRedirects as exc:
            raise TaskAppError("redirect", f"{what}: too many redirects") from exc
        except httpx.DecodingError as exc:
            raise TaskAppError("not_json", f"{what}: {self._clean(exc)}", status=200) from exc
        return self._read(what, response)

    def _read(self, what: str, response: httpx.Response) -> object:
        status = response.status_code
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError) as exc:
            if response.is_success:
                kind = response.headers.get("content-type", "no content-type")
                raise TaskAppError("not_json", f"{what} answered {status} with {kind}, expected JSON", status=status) from exc
            text = response.text.strip()
            body = {"detail": "" if text.startswith("<") else text}  # a proxy's page says less than its status
        if response.is_success:
            return body
        code, message, retryable = error_of(body)
        said = self._clean(": ".join(part for part in (code, message) if part) or response.reason_phrase)
        default = status in _RETRYABLE or status >= 500
        if code == "missing_environment_api_key":
            reason, default = "unauthorised", False
        elif status == 400 and code.lower() in ("unauthorised", "unauthorized"):
            reason = "unauthorised"
        elif response.is_redirect:
            reason = "redirect"
        else:
            reason = _REASONS.get(status, "server_error" if status >= 500 else "invalid_request")
        raise TaskAppError(
            reason, f"{what} answered {status}: {said}", retryable=default and retryable is not False, status=status
        )

    def _clean(self, text: object) -> str:
        """At most 300 characters, keys and their 15-character prefixes removed: some apps echo those."""
        cleaned = str(text)
        for secret in self._secrets:
            for part in (secret, secret[:15]):
                cleaned = cleaned.replace(part, "***")
        return cleaned[:300]


@asynccontextmanager
async def connect_task_app(
    url: str,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    concurrency: int = 64,
    probe_timeout_s: float = PROBE_TIMEOUT_S,
) -> AsyncIterator[TaskApp]:
    """A `TaskApp` at `url`, for up to `concurrency` calls at once, each bounded by `timeout_s` seconds (health
    and task_info by `probe_timeout_s`). Sends nothing yet.

    The key goes out in all three headers that task apps read, and to no other host: a redirect that leaves the origin is an
    error. `headers` are added to every request. Raises ValueError for a URL that is not http(s).
    """
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ValueError(f"the task app URL is not a URL ({exc}); expected http(s)://host[:port]") from exc
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"the task app URL has scheme {base.scheme!r} and host {base.host!r}; expected http(s)://host[:port]")
    if base.port is not None and not 0 < base.port < 65536:
        raise ValueError(f"the task app URL has port {base.port}; a port is 1 to 65535")
    if concurrency < 1 or not timeout_s > 0:
        raise ValueError(f"concurrency={concurrency} must be >= 1 and timeout_s={timeout_s} must be > 0")
    auth = {"X-API-Key": api_key, "X-API-Keys": api_key, "Authorization": f"Bearer {api_key}"} if api_key else {}
    extra = dict(headers or {})
    for name, value in {**auth, **extra}.items():
        if not (value.isascii() and value.isprintable() and value == value.strip()):
            raise ValueError(f"the value of header {name} must be printable ASCII without spaces around it")
    secrets = tuple(secret for secret in (api_key, *extra.values()) if secret and len(secret) >= 6)

    async def stay(request: httpx.Request) -> None:
        if not _same_origin(base, request.url):
            raise TaskAppError("redirect", f"the task app at {base.host} redirects to {request.url.host}; use that URL")

    async with httpx.AsyncClient(
        base_url=base,
        headers={**auth, **extra},
        follow_redirects=True,
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=KEEP_ALIVE_S),
        timeout=httpx.Timeout(PROBE_TIMEOUT_S),
        mounts=DIRECT,
        event_hooks={"request": [stay]},
    ) as http:
        yield TaskApp(http, timeout_s, secrets, min(probe_timeout_s, timeout_s))


def _same_origin(base: httpx.URL, other: httpx.URL) -> bool:
    if base.host != other.host:
        return False
    upgrade = (base.scheme, other.scheme) == ("http", "https") and base.port is None and other.port is None
    return upgrade or (base.scheme, base.port) == (other.scheme, other.port)


def build_request(
    problem: Problem,
    trace_id: str,
    inference_url: str,
    *,
    env_name: str,
    policy_name: str,
    model: str,
    max_turns: int,
    sampling: SamplingParams,
    env_config: Mapping[str, Any],
    policy_config: Mapping[str, Any],
    timeout_s: float,
    session_id: str,
    ops: Sequence[Any] = (),
) -> dict[str, Any]:
    """One episode as a JSON object that every known task-app version accepts: the union of their fields.

    `ops`: without any, agent and environment alternate for `max_turns` turns.
    """
    config = {**env_config, **problem.config, "max_turns": max_turns, "split": problem.split}
    policy = {
        **policy_config,
        "model": model,
        "inference_url": inference_url,
        "trace_correlation_id": trace_id,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    return {
        "run_id": trace_id,
        "trace_correlation_id": trace_id,
        "mode": "rl",
        "env": {"env_name": env_name, "seed": problem.seed, "config": config},
        "policy": {"policy_name": policy_name, "config": policy},
        "ops": list(ops) or ["agent", "env"] * max_turns,
        # "full": the oldest version rejects "structured"; max_time_s: the newest wants an int
        "record": {"trajectories": True, "logprobs": True, "value": False, "return_trace": True, "trace_format": "full"},
        "on_done": "terminate",
        "safety": {"max_ops": 8 * max_turns, "max_time_s": math.ceil(timeout_s)},
        "training_session_id": session_id,
        # the same three at top level, for apps written by hand
        "batch_size": 1,
        "max_turns": max_turns,
        "inference_url": inference_url,
    }


async def preflight(app: TaskApp, env_name: str | None = None) -> dict[str, Any]:
    """The app's task set, once it is known to be up and to accept our key. Raises TaskAppError that says what to do."""
    try:
        health = await app.health()
        if isinstance(health, Mapping) and health.get("healthy") is False:
            raise TaskAppError("unhealthy", f"the task app at {app.address} says healthy=false; see its log")
        info = await app.task_info(env_name=env_name)  # health alone may pass without a valid key
    except TaskAppError as exc:
        raise TaskAppError(exc.reason, f"{exc}. {_advice(exc)}", retryable=exc.retryable, status=exc.status) from exc
    taskset = info.get("taskset") if isinstance(info, Mapping) else None
    if not isinstance(taskset, dict):
        raise TaskAppError(
            "invalid_reply",
            f"GET /task_info of the task app at {app.address} must answer {{'taskset': {{...}}}}",
        )
    return taskset


def _advice(error: TaskAppError) -> str:
    advice = {
        "unauthorised": "Set ENVIRONMENT_API_KEY here to the key that the task app was started with.",
        "unreachable": "Is it running? Start it with `python -m rollout.task_app FILE.py --port PORT` and check the task URL.",
        "timeout": "It accepts connections but does not answer: see its log.",
        "not_found": "Check the task URL's path and rollout.env_name: an app serves /health, /task_info and /rollout.",
        "not_json": "Is this the URL of a task app?",
        "redirect": "Use the URL it redirects to.",
    }
    return advice.get(error.reason, "See the task app's log.")
