"""One vLLM server of a fleet: how it is started, sent weights and looked after, and what is known of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from serving_bridge.publish import PublishError, Timings, Transport, publish, require_awake
from serving_bridge.stage import Staged
from serving_bridge.vllm_client import ServerError, VllmClient
from serving_bridge.vllm_server import VllmServer

type State = Literal["dead", "alive", "serving", "gone"]
"""dead: to be brought back. alive: answers, its weights unknown. serving: has the weights published last. gone: given up."""

HEALTH_S, POLL_S = 5.0, 2.0
MISSES = 5
"""Looks in a row without an answer after which a server counts as dead; a long garbage collection is no death."""
LAST_WORDS_S = 3.0
"""Seconds for a process that fails its requests to end, so that its log tells why."""
MOVED = 1e-4
"""Nats per token by which the trainer's log-probabilities of a probe must change before the server's have to."""
FOLLOWED, NOISE = 0.25, 0.02
"""Part of the trainer's change that the server's must reach, and what company and rounding may take from it."""


class Probe(NamedTuple):
    """A text whose log-probabilities are compared after every publish."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The trainer's, `[t-1]`, under the weights that are published."""


@dataclass(eq=False)
class Member:
    """One server and what is known of it. Each start gives it a client of its own; with the old one ends what it was asked."""

    name: str
    server: VllmServer | None
    """None when others started it."""
    url: str
    """Where it is if others started it."""
    connect: Callable[[str], VllmClient]
    client: VllmClient
    state: State = "dead"
    reason: str = "not started yet"
    in_flight: int = 0
    versions: set[int] = field(default_factory=set)
    """Versions it acknowledged since it started."""
    latest: str = ""
    """What it calls the last of them."""
    probe: tuple[Probe, list[float]] | None = None
    """What was expected and found when its answer to a probe last changed."""
    publishes: int = 0
    restarts: list[float] = field(default_factory=list)
    """Times at which it was brought back."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is dead or gone."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set but while it is sent weights: requests that it kept may end with them before they are verified."""

    def __post_init__(self) -> None:
        self.settled.set()

    async def start(self) -> None:
        """Launch it if it is ours. Raises ServerDied, ValueError."""
        await self.client.aclose()
        if self.server is not None:
            await self.server.start()
        self.client = self.connect(self.url if self.server is None else self.server.url)

    async def stop(self) -> None:
        """End all that it was asked, and its process if it is ours."""
        await self.client.aclose()
        if self.server is not None:
            await self.server.stop()

    async def last_words(self) -> str:
        """Why its process ended, if it is ours and ends by itself within `LAST_WORDS_S`; else nothing."""
        with suppress(TimeoutError):
            if self.server is not None:
                return await asyncio.wait_for(self.server.died(), LAST_WORDS_S)
        return ""

    async def admit(
        self, check: Callable[[VllmClient], Awaitable[Sequence[str]]], transport: Transport, timeout_s: float
    ) -> Sequence[str]:
        """What stands against training with it; if nothing does, the way for weights is open. Raises ServerError."""
        await self.client.call("GET", "/health", HEALTH_S)
        problems = await check(self.client)
        if not problems:
            await require_awake(self.client)
            await transport.connect(self.client, timeout_s)
            self.versions, self.probe = set(), None
        return problems

    async def take(
        self, staged: Staged, probe: Probe | None, transport: Transport, timeout_s: float, most_gap: float
    ) -> tuple[Timings, float | None]:
        """Publish to it; the seconds, and the gap of the probe. Raises PublishError, ServerError."""
        self.publishes += 1
        self.settled.clear()
        try:
            timings = await publish(self.client, staged, transport, timeout_s)
            gap = None if probe is None else self._compared(probe, await self.client.probe(probe.ids, timeout_s), most_gap)
            self.versions.add(staged.version)
            self.latest = staged.id
        finally:
            self.settled.set()
        return timings, gap

    def _compared(self, probe: Probe, found: list[float], most_gap: float) -> float:
        """Mean absolute difference. PublishError when it is too wide, or the server computes as before and should not."""
        gap = _distance(found, probe.logprobs)
        if not gap <= most_gap:
            raise PublishError(
                f"server and trainer differ by {gap:.3g} nats per token on the probe, more than {most_gap:g}: "
                "they do not compute the same policy"
            )
        if self.probe is None:
            self.probe = probe, found
            return gap
        moved, followed = _distance(self.probe[0].logprobs, probe.logprobs), _distance(self.probe[1], found)
        if (followed == 0 and moved > MOVED) or followed < moved * FOLLOWED - NOISE:
            raise PublishError(
                f"the probe's log-probabilities moved by {moved:.3g} nats per token at the trainer and by {followed:.3g} at "
                "the server since weights last arrived there: it has stale weights"
            )
        if followed > 0:
            self.probe = probe, found
        return gap

    async def trouble(self) -> str:
        """Looks after it, until there is a reason not to use it any longer."""
        missed = 0
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if fault := await self.fault():
                    return fault
                missed = 0
            except ServerError as error:
                missed += 1
                if missed == MISSES or error.status is not None:
                    return str(error)

    async def fault(self) -> str | None:
        """Why it must not be used any longer, in words; None when nothing is known. ServerError when it does not answer."""
        client, publishes = self.client, self.publishes
        await client.call("GET", "/health", HEALTH_S)
        if self.state != "serving":
            return None
        try:
            idle, found = await client.idle(HEALTH_S), await client.weights(HEALTH_S)
        except ServerError as error:
            if error.status is None:
                return None  # these are answered between two steps of the engine, and a step may be long
            raise
        if self.client is not client or self.state != "serving" or self.publishes != publishes:
            return None  # what it said is of another time
        if idle:
            return "somebody else paused it or put it to sleep"
        return None if found == self.latest else f"it has weights {found!r} after it was sent {self.latest!r}: it started anew"


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
