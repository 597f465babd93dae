"""Any ASGI app behind a real socket, inside the running event loop. Knows nothing about rollouts."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import uvicorn

KEEP_ALIVE_S = 75
"""Longer than any client of ours keeps an idle socket (15 s), so it is never the server that closes one first."""
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_GRACE_S = 2
_BACKLOG = 2048


class _Cancelled(logging.Filter):
    """Leaves out the tracebacks of requests that were cancelled: uvicorn logs those it ends itself as errors of the app."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


_CANCELLED = _Cancelled()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the program, not to one of its servers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except SystemExit as exc:  # uvicorn's answer to a failed lifespan; it would take the whole loop down
            raise RuntimeError("the app's lifespan startup failed; its traceback is in the log of 'uvicorn.error'") from exc


class Server:
    """A running server: `url`, `port`, `aclose()`. Also an async context manager that closes on exit."""

    def __init__(self, uvicorn_server: _Uvicorn, task: "asyncio.Task[None]", sock: socket.socket, host: str):
        self._uvicorn, self._task, self._socket = uvicorn_server, task, sock
        self.host = host
        self.port: int = sock.getsockname()[1]
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def wait(self) -> None:
        """Returns when the server has stopped; raises what stopped it, if anything did."""
        await asyncio.shield(self._task)

    async def aclose(self) -> None:
        """Stops accepting, lets running requests finish for 2 s, then cancels them; at most 5 s. Safe to call twice."""
        self._uvicorn.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        if not done:
            self._uvicorn.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        self._socket.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def serve(app: Any, host: str = "127.0.0.1", port: int = 0) -> Server:
    """A `Server` that already answers: `async with await serve(app) as server`. Port 0 picks a free one.

    Raises OSError when host:port cannot be bound, RuntimeError when the app does not start within 10 s.
    """
    sock = _listen(host, port)
    logging.getLogger("uvicorn.error").addFilter(_CANCELLED)  # the same one again is no second one
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        backlog=_BACKLOG,
    )
    uvicorn_server = _Uvicorn(config)
    task = asyncio.create_task(uvicorn_server.serve(sockets=[sock]), name=f"server {host}:{sock.getsockname()[1]}")
    server = Server(uvicorn_server, task, sock, host)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not uvicorn_server.started and not task.done():
                await asyncio.sleep(0.005)
    except BaseException as exc:
        await server.aclose()
        if isinstance(exc, TimeoutError):
            raise RuntimeError(f"the app on {server.url} did not start within {START_TIMEOUT_S:g} s") from exc
        raise
    if task.done():
        sock.close()
        task.result()
        raise RuntimeError(f"the app on {server.url} stopped while starting")
    return server


def _listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. It listens at once: two sockets that are only bound could share a port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}; choose another port, or 0") from exc
    return sock
