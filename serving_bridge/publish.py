"""New weights into one vLLM server, in one order, safe to repeat: pause, transfer, verify, forget old prefixes, resume.

Requests in flight are kept: they go on with the new weights, and each token carries the version that sampled it. How the
bytes travel is a `Transport`; what is the same for all of them is `publish`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from serving_bridge.stage import Staged
from serving_bridge.vllm_client import ADMIN_S, ServerError, VllmClient

ATTEMPTS = 3
"""Calls of one phase whose connection is lost. The server applies an update once, however often it is posted."""


class PublishError(Exception):
    """A server did not take new weights; the message names it, the phase and the reason."""


@runtime_checkable
class Transport(Protocol):
    """How the bytes of a staged version reach a server's workers."""

    backend: str
    """What vLLM calls it: `--weight-transfer-config '{"backend": ...}'`."""

    async def connect(self, client: VllmClient, timeout_s: float) -> None:
        """Once for every start of a server, before the first transfer."""
        ...

    async def transfer(self, client: VllmClient, staged: Staged, timeout_s: float, again: bool = False) -> None:
        """The server computes with the weights and calls them `staged.id` afterwards, or this raises. Harmless to repeat.

        `again`: it has lost what it was sent, so that what it remembers to have does not count.
        """
        ...

    def offer(self, staged: Staged) -> None:
        """Before the transfers of a version."""
        ...

    def vacate(self, staged: Staged) -> None:
        """Before the file of a version is written over: it is read no more."""
        ...

    async def aclose(self) -> None:
        """Let go of what transfers share."""
        ...


@dataclass(frozen=True)
class Timings:
    """Seconds of the phases of one publish, in their order."""

    pause: float = 0.0
    transfer: float = 0.0
    verify: float = 0.0
    reset: float = 0.0
    resume: float = 0.0

    @property
    def paused(self) -> float:
        """How long the server did not generate."""
        return self.pause + self.transfer + self.verify + self.reset + self.resume


async def publish(client: VllmClient, staged: Staged, transport: Transport, timeout_s: float) -> Timings:
    """The server samples with `staged`, and calls it `staged.id`, from here on. `timeout_s` bounds the transfer.

    A server that has this version already, its last publish having been cut short, is only resumed, unless it has slept since
    it started. Raises PublishError; the server is then not to be used until a publish succeeds, and stays paused if it was
    reached.
    """
    laps: list[float] = []
    version = staged.id

    async def phase(name: str, step: Callable[[], Awaitable[Any]]) -> None:
        started = time.monotonic()
        try:
            await step()
        except ServerError as error:
            raise PublishError(f"{name} of {version} failed: {error}") from error
        laps.append(time.monotonic() - started)

    async def transfer() -> None:
        if slept or await repeated(client.weights) != version:
            await transport.transfer(client, staged, timeout_s, slept)

    try:
        slept = await require_awake(client)
    except ServerError as error:
        raise PublishError(f"publish of {version} failed before it began: {error}") from error
    await phase("pause", lambda: repeated(lambda: client.post("/pause", mode="keep")))
    await phase(f"transfer within serving.sync_timeout_s = {timeout_s:g} s", transfer)
    await phase("verification", lambda: _acknowledged(client, version))
    await phase("reset of the prefix cache", lambda: _forget_prefixes(client))
    await phase("resumption", lambda: repeated(lambda: client.post("/resume")))
    return Timings(*laps)


async def require_awake(client: VllmClient) -> bool:
    """Whether a server has slept since it started; its weights may have been lost then. ServerError for one that is asleep:
    its weights are not in its memory, or are lost, and writing there may end it."""
    asleep, slept = await repeated(client.slept)
    if asleep:
        raise ServerError(f"{client.url} is asleep; wake it (POST /wake_up) before it is sent weights", gone=False)
    return slept


async def _acknowledged(client: VllmClient, version: str) -> None:
    if (found := await repeated(client.weights)) != version:
        raise ServerError(f"{client.url} says it has weights {found!r} after it was sent {version!r}", gone=False)


async def _forget_prefixes(client: VllmClient) -> None:
    # Requests that were kept hold on to what they computed with the old weights; the cache would, too.
    found = await repeated(lambda: client.post("/reset_prefix_cache", reset_running_requests="true"))
    if isinstance(found, dict) and found.get("success") is False:
        raise ServerError(f"{client.url} keeps prefixes that it computed with the old weights", gone=False)


async def repeated[T](step: Callable[[], Awaitable[T]]) -> T:
    """What `step` returns. It is repeated when the connection is lost: an idle one may be at any time."""
    deadline = time.monotonic() + ADMIN_S
    for _ in range(ATTEMPTS - 1):
        try:
            return await step()
        except ServerError as error:
            if not error.gone or error.status is not None or time.monotonic() >= deadline:
                raise
    return await step()


async def update_weights(
    client: VllmClient,
    info: dict[str, Any],
    version: str,
    timeout_s: float,
    alongside: Callable[[], Awaitable[Any]] | None = None,
) -> None:
    """start, update, finish: one whole update through vLLM's weight-transfer routes.

    What is lost with its connection is asked for again: workers know an update by the id in `info`. `alongside` runs beside
    the post, for a sender that takes part; then there is one post only. Raises ServerError.
    """
    deadline = time.monotonic() + timeout_s
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await _start(client, deadline)
            post = client.post("/update_weights", {"update_info": info}, timeout_s=max(deadline - time.monotonic(), 1.0))
            await (post if alongside is None else together(post, alongside()))
            await client.post(
                "/finish_weight_update", {"weight_version": version}, timeout_s=max(deadline - time.monotonic(), ADMIN_S)
            )
            return
        except ServerError as error:
            # An answer with a reason (a tensor refused) will be the same again; silence may have been the network.
            if alongside or attempt == ATTEMPTS or error.status is not None or time.monotonic() >= deadline:
                raise


async def forget_update(client: VllmClient) -> None:
    """Makes the workers of a server with `gspo_vllm` forget which update they have, by one that they cannot read."""
    await _start(client, time.monotonic() + ADMIN_S)
    with suppress(ServerError):
        await client.post("/update_weights", {"update_info": {"id": "", "count": 0}})


async def together(post: Awaitable[Any], send: Awaitable[Any]) -> None:
    """Both to their end; the first failure cancels the other and is raised."""
    tasks = [asyncio.ensure_future(post), asyncio.ensure_future(send)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(client: VllmClient, deadline: float) -> None:
    """Begin an update, ending one that an earlier publisher left open; first waits for what is still being applied."""

    def post(path: str, body: Any = None) -> Awaitable[Any]:
        return client.post(path, body, timeout_s=max(deadline - time.monotonic(), ADMIN_S))

    try:
        await post("/start_weight_update")
    except ServerError as error:
        if "already active" not in str(error):
            raise
        await post("/finish_weight_update", {})
        await post("/start_weight_update")
