"""Several vLLM servers as one engine: requests are routed, weights published to all, a server that failed is fenced.

A server gets requests only while it is known to compute with the version published last. One that died, hung, slept or missed
a version gets none until it has taken the current weights; its requests are sampled again elsewhere, or by itself later.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from rollout.types import Completion, SamplingParams
from serving_bridge.member import Member, State
from serving_bridge.member import Probe as Probe
from serving_bridge.publish import PublishError, Timings, Transport
from serving_bridge.routing import Affinity
from serving_bridge.stage import Staged
from serving_bridge.vllm_client import REFUSED, ServerError, VllmClient
from serving_bridge.vllm_server import Restarts, ServerDied, VllmServer

ATTEMPTS = 8
"""How often one request is tried."""


class FleetError(Exception):
    """No server can serve, and none will; the message says why of each."""


class Published(NamedTuple):
    """What a publish did, by server."""

    timings: Mapping[str, Timings]
    gaps: Mapping[str, float]
    """Mean absolute difference of the probe's log-probabilities, nats per token."""
    failed: Mapping[str, str]
    """Why servers did not take the weights."""


class Fleet:
    """An engine: `await fleet.sample(ids, params)`. Use it from one event loop; `open` it first, `aclose` it at the end.

    `servers`: processes to launch and watch, or URLs of servers that others run. `connect(url)` makes a client. `check(client)`
    returns what stands against training with a server, in words. `sync_timeout_s` bounds a publish, `most_gap` is the largest
    mean difference of a probe's log-probabilities that passes. `restarts`: how often a process is started again, and how soon
    servers are tried again.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer | str],
        connect: Callable[[str], VllmClient],
        transport: Transport,
        check: Callable[[VllmClient], Awaitable[Sequence[str]]],
        *,
        on_event: Callable[[dict[str, Any]], None],
        sync_timeout_s: float,
        most_gap: float,
        restarts: Restarts = Restarts(),  # noqa: B008 (frozen)
    ):
        self._transport, self._check, self._on_event = transport, check, on_event
        self._sync_timeout_s, self._most_gap, self._restarts = sync_timeout_s, most_gap, restarts
        self.members = [
            Member(f"server {i}", None, each, connect, connect(each))
            if isinstance(each, str)
            else Member(f"server {i}", each, "", connect, connect(""))
            for i, each in enumerate(servers)
        ]
        self._affinity, self._changed, self._syncing = Affinity(), asyncio.Event(), asyncio.Lock()
        self._current: tuple[Staged, Probe | None] | None = None
        self._watchers: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start and check every server. Raises ServerDied, ServerError, FleetError (what stands against a server)."""
        tasks = [asyncio.create_task(self._start(member)) for member in self.members]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await _ended(tasks)
            await self.aclose()
            raise
        self._watchers = [asyncio.create_task(self._watch(member), name=f"watch {member.name}") for member in self.members]

    async def aclose(self) -> None:
        """Stop the servers that were launched; let the others go on. What is being sampled fails. Safe to call twice."""
        await _ended(self._watchers)
        for member in self.members:
            member.state, member.reason = "gone", "the fleet was closed"
        self._changed.set()
        await asyncio.gather(*(member.stop() for member in self.members), return_exceptions=True)
        await self._transport.aclose()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion from a server that has the current weights; waits for one, and moves on when it fails.

        Raises FleetError when no server is left, ValueError when a server refuses the request or its reply is none.
        """
        reason, tried = "", set[str]()
        for _ in range(ATTEMPTS):
            member = await self._available(prompt_ids, tried)
            client = member.client
            member.in_flight += 1
            try:
                completion = await client.sample(prompt_ids, params)
            except ServerError as error:
                if error.status in REFUSED or (error.status is None and not error.gone):
                    raise ValueError(str(error)) from error
                reason = str(error)
                await self._suspect(member, client, reason)
                tried.add(member.name)
                continue
            finally:
                member.in_flight -= 1
            if not set(completion.versions) <= member.versions:
                await member.settled.wait()
            if not (strange := set(completion.versions) - member.versions):
                return completion
            reason = f"{member.name} sampled with weights {sorted(strange)} that it was not sent"
            self._distrust(member, client, reason)
        raise FleetError(f"a request failed {ATTEMPTS} times, the last time because {reason}")

    def vacate(self, staged: Staged) -> None:
        """Before the file of an earlier version is written over."""
        self._transport.vacate(staged)

    async def publish(self, staged: Staged, probe: Probe | None = None) -> Published:
        """All servers that answer have the weights afterwards, or are fenced. FleetError when not one took them."""
        async with self._syncing:
            first, self._current = self._current is None, (staged, probe)
            await asyncio.to_thread(self._transport.offer, staged)
            alive = [member for member in self.members if member.state in ("alive", "serving")]
            for member in alive:
                member.state = "alive"
            done = await asyncio.gather(*(self._send(member, staged, probe) for member in alive))
        found = dict(zip((member.name for member in alive), done, strict=True))
        failed = {name: each for name, each in found.items() if isinstance(each, str)}
        serving = any(member.state == "serving" for member in self.members)
        if not serving and (first or all(member.state == "gone" for member in self.members)):
            raise FleetError(f"no server took the weights of version {staged.version}: {self._reasons()}")
        passed = {name: each for name, each in found.items() if not isinstance(each, str)}
        gaps = {name: gap for name, (_, gap) in passed.items() if gap is not None}
        return Published({name: timings for name, (timings, _) in passed.items()}, gaps, failed)

    async def _send(self, member: Member, staged: Staged, probe: Probe | None) -> tuple[Timings, float | None] | str:
        """Publish to one server and verify; what failed, in words, with the server fenced."""
        client = member.client
        try:
            taken = await member.take(staged, probe, self._transport, self._sync_timeout_s, self._most_gap)
        except Exception as error:  # whatever it is, the others are not to wait for it
            what = str(error) if isinstance(error, PublishError | ServerError) else f"{type(error).__name__}: {error}"
            self._distrust(member, client, f"did not take version {staged.version}: {what}")
            return member.reason
        if member.client is not client or member.state != "alive":
            return member.reason  # it failed otherwise, meanwhile
        self._affinity.forget(member.name)
        member.state, member.reason = "serving", ""
        self._changed.set()
        if member.restarts and len(member.versions) == 1:
            self._tell("server.rejoined", member, f"with version {staged.version}")
        return taken

    async def _start(self, member: Member) -> None:
        """Start a server and check it. Raises ServerDied, ServerError, FleetError."""
        if member.server is not None:
            self._tell("server.starting", member, "")
        await member.start()
        if problems := await member.admit(self._check, self._transport, self._sync_timeout_s):
            raise FleetError("\n  ".join([f"{member.name} at {member.client.url} cannot be trained with:", *problems]))
        member.state, member.reason = "alive", "has no weights of this run yet"
        member.failed.clear()
        self._tell("server.ready", member, "")

    async def _watch(self, member: Member) -> None:
        try:
            await self._keep(member)
        except Exception as error:  # or all would wait for a server that nobody brings back
            self._fence(member, "gone", str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}")
            await member.stop()

    async def _keep(self, member: Member) -> None:
        """Bring a server back whenever it fails. FleetError when it is not worth it, or its restarts are used up."""
        while True:
            self._fence(member, "dead", await self._failure(member))
            self._fence(member, "dead", await member.last_words() or member.reason)
            await member.stop()
            again = self._restarts if member.server is not None else replace(self._restarts, limit=sys.maxsize)
            if (delay := again.next(member.restarts, time.monotonic())) is None:
                raise FleetError(f"{member.reason}; serving.launch.max_restarts = {again.limit} are used up")
            member.restarts.append(time.monotonic())
            await asyncio.sleep(delay)
            try:
                await self._start(member)
            except (ServerDied, ServerError) as error:
                self._fence(member, "dead", str(error))
            else:
                await self._rejoin(member)

    async def _failure(self, member: Member) -> str:
        """Why the server has to be brought back, as soon as it has."""
        signs: list[Coroutine[Any, Any, Any]] = [member.failed.wait(), member.trouble()]
        if member.server is not None:
            signs.append(member.server.died())
        tasks = [asyncio.create_task(sign) for sign in signs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(tasks)
        return member.reason if member.failed.is_set() else str(done.pop().result())

    async def _rejoin(self, member: Member) -> None:
        """Give a server that came back the current weights."""
        async with self._syncing:
            if self._current is not None and member.state == "alive":
                await self._send(member, *self._current)

    async def _available(self, prompt_ids: Sequence[int], tried: Set[str]) -> Member:
        """A server to send a request to, one not tried yet if there is; waits for one. FleetError when there will be none."""
        while True:
            self._changed.clear()
            load = {member.name: member.in_flight for member in self.members if member.state == "serving"}
            if load:
                chosen = self._affinity.choose(prompt_ids, {name: n for name, n in load.items() if name not in tried} or load)
                return next(member for member in self.members if member.name == chosen)
            if all(member.state == "gone" for member in self.members):
                raise FleetError(f"no vLLM server is left: {self._reasons()}")
            await self._changed.wait()

    async def _suspect(self, member: Member, client: VllmClient, reason: str) -> None:
        """A request failed: fence its server unless it says that it is well."""
        if member.client is not client or member.failed.is_set():
            return
        try:
            if fault := await member.fault():
                self._distrust(member, client, fault)
        except ServerError:
            self._distrust(member, client, reason)

    def _distrust(self, member: Member, client: VllmClient, reason: str) -> None:
        """No more requests for the server behind `client`; it is brought back."""
        if member.client is client and member.state not in ("dead", "gone"):  # else somebody found out first
            self._fence(member, "dead", reason)

    def _fence(self, member: Member, state: State, reason: str) -> None:
        if member.state == state and member.reason == reason:
            return
        member.state, member.reason = state, reason
        member.failed.set()
        self._affinity.forget(member.name)
        self._changed.set()
        self._tell("server.fenced", member, reason)

    def _reasons(self) -> str:
        return "; ".join(f"{member.name}: {member.reason}" for member in self.members)

    def _tell(self, kind: str, member: Member, message: str) -> None:
        self._on_event({"type": kind, "server": member.name, "url": member.client.url, "message": message})


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels them and waits until they are done."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
