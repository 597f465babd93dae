"""HTTP to one vLLM server: every exchange has a deadline, every failure is one kind of error, nothing is left open."""

import asyncio
import json
import re
from collections.abc import Awaitable
from typing import Any, Self

import anyio
import httpx

from rollout.client import DIRECT

CONNECT_S, WRITE_S = 10.0, 30.0
KEEP_ALIVE_S = 3.0
"""Shorter than the 5 s after which vLLM closes an idle connection, so it is never the server that closes one first."""
ADMIN_S = 60.0
"""Deadline of an admin call that moves no weights."""
_LOGIN = re.compile(r"//[^/@\s]*@")


class ServerError(Exception):
    """A call of a vLLM server failed; the message names the server, the call and what came back.

    `gone` is true when nothing says that the server is still there: connection refused or lost, a deadline missed, a 5xx.
    `status` is that of its answer, None when there was none or what it said was no answer to the question.
    """

    def __init__(self, message: str, *, gone: bool, status: int | None = None):
        super().__init__(message)
        self.gone, self.status = gone, status


class Connection:
    """To the server at `url`; `token` goes with every request. `kept`: connections that are kept for the next requests.

    There are as many as requests in flight, so that none of these can keep an admin call waiting. Close it with `aclose`.
    """

    def __init__(self, url: str, token: str = "", *, kept: int = 64):
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the token of a vLLM server must be printable ASCII; see serving.token_env")
        self.url, self._token = _LOGIN.sub("//", url.rstrip("/")), token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_keepalive_connections=kept, keepalive_expiry=KEEP_ALIVE_S)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, mounts=DIRECT, follow_redirects=False)
        self._in_flight: set[anyio.CancelScope] = set()
        self.closed = False

    async def aclose(self) -> None:
        """Close all connections; what is in flight, and what is still asked, is a ServerError."""
        self.closed = True
        while self._in_flight:  # closing the connections beneath them would leave some open
            for scope in self._in_flight:
                scope.cancel()
            await asyncio.sleep(0.001)
        await asyncio.shield(self._http.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def get(self, path: str, **query: str) -> Any:
        """The JSON of GET `path`. Raises ServerError."""
        return await self.call("GET", path, ADMIN_S, params=query)

    async def table(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        """The JSON object of GET `path`. Raises ServerError."""
        if isinstance(found := await self.call("GET", path, timeout_s or ADMIN_S), dict):
            return found
        raise self._error(f"GET {self.url}{path} answered {str(found)!r}, which is no JSON object", gone=False)

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None = None, **query: str) -> Any:
        """The JSON (or text) of POST `path`. Raises ServerError."""
        content: dict[str, Any] = {"params": query} if body is None else {"params": query, "json": body}
        return await self.call("POST", path, timeout_s or ADMIN_S, **content)

    async def call(self, method: str, path: str, timeout_s: float, **content: Any) -> Any:
        """One HTTP exchange within `timeout_s`: the reply's JSON, or its text where it is none. Raises ServerError."""
        timeouts = httpx.Timeout(connect=min(CONNECT_S, timeout_s), pool=timeout_s, read=timeout_s, write=WRITE_S)
        what, closed = f"{method} {self.url}{path}", "the connection was closed from this side"
        if self.closed:
            raise ServerError(f"{what}: {closed}", gone=True)
        try:
            response = await self._within(timeout_s, self._http.request(method, path, timeout=timeouts, **content))
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerError(f"{what}: {closed if self.closed else f'no answer within {timeout_s:g} s'}", gone=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._error(f"{what}: {type(error).__name__}: {error}", gone=True) from error
        if response.is_success:
            return _content(response)
        said = f"{what} answered {response.status_code}: {_message(response)}"
        raise self._error(said, gone=response.status_code >= 500, status=response.status_code)

    async def _within[T](self, timeout_s: float, exchange: Awaitable[T]) -> T:
        """What `exchange` returns. TimeoutError when it takes longer, or when this client is closed meanwhile.

        Cut off where it closes idle connections, httpx would leave them open. It shields that from the cancellation of a scope,
        not from that of a task; so it has a task of its own, whose scope is cancelled.
        """
        scope = anyio.CancelScope(deadline=anyio.current_time() + timeout_s)

        async def run() -> tuple[T] | None:
            with scope:
                return (await exchange,)
            return None

        task = asyncio.create_task(run())
        self._in_flight.add(scope)
        try:
            found = await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._in_flight.remove(scope)
        if found is None:
            raise TimeoutError
        return found[0]

    def _error(self, said: str, *, gone: bool, status: int | None = None) -> ServerError:
        """What a server said may hold anything, also what it was told."""
        said = said.replace(self._token, "***") if self._token else said
        return ServerError(said[:1000], gone=gone, status=status)


def _content(response: httpx.Response) -> Any:
    try:
        return json.loads(response.content) if response.content else {}
    except ValueError:
        return response.text


def _message(response: httpx.Response) -> str:
    try:
        body = json.loads(response.content)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return response.text
