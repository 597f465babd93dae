"""Problems in, groups of trajectories out: one request per trajectory, bounded, with deadlines and retries. Knows no tokens."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from rollout.client import TaskAppError, build_request
from rollout.replies import Reply, ReplyError, parse_reply
from rollout.types import Group, Problem, Recorder, SamplingParams, Trajectory, Turn

OnEvent = Callable[[dict[str, Any]], None]
OnDone = Callable[[int, Trajectory], None]


@runtime_checkable
class RolloutApp(Protocol):
    """What the runner needs of a task app."""

    async def rollout(self, request: Mapping[str, Any]) -> object:
        """The decoded JSON reply. Raises TaskAppError."""
        ...


@dataclass(frozen=True)
class RolloutSettings:
    """How every rollout of a run is asked for. `timeout_s`: seconds per attempt; `max_attempts` includes the first one.

    `backoff_s`: seconds before each retry, the last one repeating.
    """

    env_name: str
    policy_name: str
    model: str
    sampling: SamplingParams
    max_turns: int = 1
    env_config: Mapping[str, Any] = field(default_factory=dict)
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_attempts: int = 3
    max_concurrent: int = 64
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0)
    session_id: str = ""
    ops: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_attempts", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be >= 1")
        if not self.backoff_s or min(self.backoff_s) < 0:
            raise ValueError(f"rollout.backoff_s={self.backoff_s} must hold at least one delay >= 0 seconds")
        if not self.timeout_s > 0:
            raise ValueError(f"rollout.timeout_s={self.timeout_s} must be > 0 seconds")


async def run_groups(
    app: RolloutApp,
    recorder: Recorder,
    problems: Sequence[Problem],
    group_size: int,
    settings: RolloutSettings,
    *,
    step: int,
    first: int = 0,
    on_event: OnEvent | None = None,
    on_done: OnDone | None = None,
    slots: AbstractAsyncContextManager[Any] | None = None,
) -> tuple[Group, ...]:
    """One group per problem, in order of `problems`, members in order; never in completion order.

    Member j of group i samples under the key `(*sampling.key, step, first + i, j)`. A rollout that fails for good is a void
    trajectory with a reason; it never raises. `on_event` hears of retries, voids and ignored reply fields;
    `on_done(i, trajectory)` of each end, in completion order. `slots`, entered around each attempt, bounds what runs at once
    where several calls share that bound. Cancelling cancels every rollout and closes its trace.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be >= 1")
    slots = slots or asyncio.Semaphore(settings.max_concurrent)
    emit = on_event or (lambda event: None)

    async def member(i: int, j: int) -> Trajectory:
        keyed = replace(settings, sampling=replace(settings.sampling, key=(*settings.sampling.key, step, first + i, j)))
        where = {"step": step, "group": first + i, "member": j, "seed": problems[i].seed}
        trajectory = replace(await _retried(app, recorder, problems[i], keyed, slots, emit, where), member=j)
        if on_done is not None:
            on_done(i, trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as tasks:
            rows = [[tasks.create_task(member(i, j)) for j in range(group_size)] for i in range(len(problems))]
    except BaseExceptionGroup as errors:  # a fault of ours or of a callback: show it, not the wrapper
        raise errors.exceptions[0] from None
    return tuple(Group(problem, tuple(task.result() for task in row)) for problem, row in zip(problems, rows, strict=True))


def void_table(groups: Sequence[Group]) -> list[tuple[str, int]]:
    """`(reason, count)` of the void trajectories, most frequent first."""
    reasons = Counter(t.reason for group in groups for t in group.trajectories if t.status == "void")
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


async def _retried(
    app: RolloutApp,
    recorder: Recorder,
    problem: Problem,
    settings: RolloutSettings,
    slots: AbstractAsyncContextManager[Any],
    emit: OnEvent,
    where: Mapping[str, Any],
) -> Trajectory:
    attempt = 0
    while True:
        attempt += 1
        async with slots:  # released while backing off
            outcome = await _attempt(app, recorder, problem, settings)
        trajectory = replace(outcome.trajectory, metrics={**outcome.trajectory.metrics, "attempts": float(attempt)})
        event = {**where, "attempt": attempt, "trace_id": trajectory.trace_id}
        for note in outcome.notes:
            emit({"type": "rollout.note", **event, "message": note})
        if trajectory.status != "void":
            return trajectory
        event.update(reason=trajectory.reason, message=outcome.message)
        if not outcome.retryable or attempt == settings.max_attempts:
            emit({"type": "rollout.void", **event})
            return trajectory
        emit({"type": "rollout.retry", **event})
        await asyncio.sleep(settings.backoff_s[min(attempt, len(settings.backoff_s)) - 1])


@dataclass(frozen=True)
class _Outcome:
    trajectory: Trajectory
    retryable: bool = False
    message: str = ""
    notes: tuple[str, ...] = ()


async def _attempt(app: RolloutApp, recorder: Recorder, problem: Problem, settings: RolloutSettings) -> _Outcome:
    """One request under a fresh trace id. The trace is closed however this ends, so late calls reach nobody."""
    trace_id, inference_url = recorder.open(settings.sampling)
    body, failure = None, None
    try:
        request = build_request(
            problem,
            trace_id,
            inference_url,
            env_name=settings.env_name,
            policy_name=settings.policy_name,
            model=settings.model,
            max_turns=settings.max_turns,
            sampling=settings.sampling,
            env_config=settings.env_config,
            policy_config=settings.policy_config,
            timeout_s=settings.timeout_s,
            session_id=settings.session_id,
            ops=settings.ops,
        )
        async with asyncio.timeout(settings.timeout_s):
            body = await app.rollout(request)
    except TaskAppError as exc:
        failure = exc
    except TimeoutError:
        failure = TaskAppError("timeout", f"no reply within rollout.timeout_s={settings.timeout_s:g} s", retryable=True)
    finally:
        engine, overflow = recorder.failure(trace_id), recorder.overflow(trace_id)
        turns = recorder.close(trace_id)
    if failure is not None:
        return _void(turns, trace_id, failure.reason, str(failure), retryable=failure.retryable)
    if engine is not None:  # an app may swallow the error and answer with a reward all the same
        return _void(turns, trace_id, "engine_failed", engine, retryable=True)
    return _read(body, turns, trace_id, overflow)


def _read(body: object, turns: tuple[Turn, ...], trace_id: str, overflow: str | None) -> _Outcome:
    try:
        reply: Reply = parse_reply(body, trace_id, len(turns))
    except ReplyError as exc:
        return _void(turns, trace_id, exc.reason, str(exc))
    if reply.aborted or reply.reward is None:
        return _void(turns, trace_id, "aborted", "the task app says aborted=true")
    if not turns:
        return _void(turns, trace_id, "no_model_calls", "no call of policy.config.inference_url was recorded")
    if not any(turn.completion_ids for turn in turns):
        return _void(turns, trace_id, "no_tokens", "completion_ids of every recorded call are empty: nothing to train on")
    cut = "context" if overflow else "length" if turns[-1].finish_reason == "length" else ""
    trajectory = Trajectory(
        turns=turns,
        reward=reply.reward,
        status="cut" if cut else "done",
        reason=cut,
        turn_rewards=reply.turn_rewards,
        trace_id=trace_id,
        metrics=reply.raw,
    )
    return _Outcome(trajectory, notes=reply.notes)


def _void(turns: tuple[Turn, ...], trace_id: str, reason: str, message: str, *, retryable: bool = False) -> _Outcome:
    return _Outcome(Trajectory(turns, None, "void", reason, trace_id=trace_id), retryable, message)
