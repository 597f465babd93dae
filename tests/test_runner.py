import asyncio
import math
import random
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from rollout_fakes import FakePolicy, hand_written

from rollout.client import connect_task_app
from rollout.runner import RolloutSettings, run_groups, void_table
from rollout.server import serve
from rollout.task_app import Env, Task, build_app
from rollout.types import Problem, SamplingParams, Turn

SETTINGS = RolloutSettings(
    env_name="echo",
    policy_name="policy",
    model="policy",
    sampling=SamplingParams(max_tokens=8),
    timeout_s=10.0,
    backoff_s=(0.01,),
)
ECHO = Task(lambda problem: f"seed {problem.seed}", lambda text, problem: float(text))


def seed_of(body):
    return body["messages"][0]["content"].split()[-1]


def run(app, script, seeds, group_size, settings=SETTINGS, **options):
    """`(groups, fake policy, events)` of one step, step 5, everything over real sockets."""
    events = []

    async def steps():
        policy = FakePolicy(script)
        gateway, server = await asyncio.gather(serve(policy.app), serve(app))
        policy.url = gateway.url
        problems = [Problem(seed) for seed in seeds]
        report = {"on_event": events.append, **options}
        try:
            async with connect_task_app(server.url, timeout_s=settings.timeout_s) as task_app:
                groups = await run_groups(task_app, policy, problems, group_size, settings, step=5, **report)
        finally:
            await asyncio.gather(gateway.aclose(), server.aclose())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return groups, policy

    groups, policy = asyncio.run(steps())
    assert sorted(policy.closed) == [trace for trace, _ in policy.opened]  # every trace opened is closed, once
    return groups, policy, events


def calling(answer):
    """A hand-written task app that calls the policy once and then answers `answer`."""

    async def rollout(body):
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            await http.post(body["inference_url"], json={"messages": [{"role": "user", "content": "seed 1"}]})
        return answer

    return hand_written(rollout)


def single(answer, script=lambda *_: "1", settings=SETTINGS):
    groups, _, events = run(answer, script, [1], 1, settings)
    return groups[0].trajectories[0], events


def test_rol_07_rewards_stay_with_their_problems_under_random_delays():
    """Results collected in completion order were attached to the wrong samples."""
    rng = random.Random(0)
    finished = []

    async def script(trace, turn, body):
        await asyncio.sleep(rng.uniform(0, 0.2))
        return seed_of(body)

    groups, policy, events = run(build_app(ECHO), script, range(8), 2, on_done=lambda i, t: finished.append((i, t.member)))
    assert [group.problem.seed for group in groups] == list(range(8))
    assert [[t.reward for t in group.trajectories] for group in groups] == [[float(i)] * 2 for i in range(8)]
    assert [[t.member for t in group.trajectories] for group in groups] == [[0, 1]] * 8
    assert [bytes(t.turns[0].completion_ids) for group in groups for t in group.trajectories] == [
        b"%d" % (i // 2) for i in range(16)
    ]
    assert sorted(finished) == [(i, j) for i in range(8) for j in range(2)]
    assert finished != sorted(finished)  # the delays did reorder
    assert {sampling.key for _, sampling in policy.opened} == {(5, i, j) for i in range(8) for j in range(2)}
    assert len({trace for trace, _ in policy.opened}) == 16
    assert events == []


def test_concurrency_is_bounded_and_used():
    running, most = 0, 0

    async def script(trace, turn, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03)
        running -= 1
        return "1"

    run(build_app(ECHO), script, range(6), 2, replace(SETTINGS, max_concurrent=3))
    assert most == 3


def test_a_retry_is_a_new_attempt_with_a_new_trace_and_the_same_key():
    groups, policy, events = run(build_app(ECHO), lambda trace, *_: 503 if trace == "trace_0000" else "2", [1], 1)
    (trajectory,) = groups[0].trajectories
    assert [(trace, sampling.key) for trace, sampling in policy.opened] == [
        ("trace_0000", (5, 0, 0)),
        ("trace_0001", (5, 0, 0)),
    ]
    assert (trajectory.trace_id, trajectory.reward, trajectory.status, trajectory.metrics["attempts"]) == (
        "trace_0001",
        2.0,
        "done",
        2,
    )
    (event,) = events
    assert (event["type"], event["reason"], event["attempt"], event["trace_id"]) == (
        "rollout.retry",
        "server_error",
        1,
        "trace_0000",
    )


def test_rol_09_an_outage_is_void_and_counted_never_a_zero():
    """A backend outage was trained on as bad answers."""
    groups, policy, events = run(build_app(ECHO), lambda trace, turn, body: 503 if seed_of(body) == "1" else "0", [0, 1], 2)
    assert [[(t.status, t.reward) for t in group.trajectories] for group in groups] == [
        [("done", 0.0)] * 2,
        [("void", None)] * 2,
    ]
    assert void_table(groups) == [("server_error", 2)]
    assert len(policy.opened) == 2 + 2 * SETTINGS.max_attempts
    assert [event["type"] for event in events].count("rollout.retry") == 2 * (SETTINGS.max_attempts - 1)
    assert [event["type"] for event in events].count("rollout.void") == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (JSONResponse({"error": {"type": "overlong_prompt", "retryable": False}}, status_code=400), "invalid_request"),
        (JSONResponse({}, status_code=404), "not_found"),
        (JSONResponse({}, status_code=422), "invalid_request"),
        (Response("<html>"), "not_json"),
        ({"metrics": {}}, "no_reward"),
        ({"metrics": {"outcome_reward": None}}, "no_reward"),
        (Response('{"metrics": {"outcome_reward": NaN}}'), "nan_reward"),
        ({"metrics": {"outcome_reward": True}}, "invalid_reward"),
        ({"metrics": {"outcome_reward": 1}, "trace_correlation_id": "trace_other"}, "correlation_mismatch"),
        ({"metrics": {"outcome_reward": 1}, "aborted": True}, "aborted"),
    ],
)
def test_rol_01_what_cannot_get_better_is_void_after_one_attempt(answer, reason):
    """The same failing prompt was rescheduled without end."""
    trajectory, events = single(calling(answer))
    assert (trajectory.status, trajectory.reward, trajectory.reason) == ("void", None, reason)
    assert trajectory.metrics["attempts"] == 1
    assert [event["type"] for event in events] == ["rollout.void"]


def test_tok_19_a_reward_without_recorded_calls_is_void():
    """Nothing to train on after a full rollout."""
    trajectory, _ = single(hand_written(lambda body: {"metrics": {"outcome_reward": 1}}))
    assert (trajectory.status, trajectory.reason, trajectory.reward) == ("void", "no_model_calls", None)
    trajectory, _ = single(calling({"metrics": {"outcome_reward": 1}}), lambda *_: "")
    assert (trajectory.status, trajectory.reason, trajectory.reward) == ("void", "no_tokens", None)


def test_rol_15_a_last_turn_cut_by_length_keeps_its_real_reward():
    """Answers cut by the token limit were punished as malformed."""
    trajectory, _ = single(build_app(ECHO), lambda *_: ("3", "length"))
    assert (trajectory.status, trajectory.reason, trajectory.reward) == ("cut", "length", 3.0)


def test_turns_and_turn_rewards_of_several_calls():
    def step(state, message):
        return state + 1, [{"role": "user", "content": "more"}], float(message["content"]), state == 2

    env = Env(lambda seed, split, config: (0, [{"role": "user", "content": "go"}]), step)
    settings = replace(SETTINGS, max_turns=5)
    trajectory, _ = single(build_app(env), lambda trace, turn, body: (str(turn), "length" if turn == 1 else "stop"), settings)
    assert (trajectory.status, trajectory.reward, trajectory.turn_rewards) == ("done", 3.0, (0.0, 1.0, 2.0))
    assert [bytes(turn.completion_ids) for turn in trajectory.turns] == [b"0", b"1", b"2"]


def test_mismatched_turn_rewards_are_dropped_with_a_note():
    trajectory, events = single(calling({"metrics": {"outcome_reward": 1, "event_rewards": [1, 2]}}))
    assert (trajectory.status, trajectory.turn_rewards) == ("done", None)
    assert [event["type"] for event in events] == ["rollout.note"]


def test_every_attempt_has_a_deadline():
    async def forever(body):
        await asyncio.sleep(30)

    trajectory, events = single(hand_written(forever), settings=replace(SETTINGS, timeout_s=0.2, max_attempts=2))
    assert (trajectory.status, trajectory.reason, trajectory.metrics["attempts"]) == ("void", "timeout", 2)
    assert len(events) == 2


def test_the_deadline_holds_when_the_app_object_ignores_its_own():
    class Stuck:
        async def rollout(self, request):
            await asyncio.sleep(30)
            return {}

    settings = replace(SETTINGS, timeout_s=0.05, max_attempts=1)
    groups = asyncio.run(run_groups(Stuck(), FakePolicy(lambda *_: "1"), [Problem(1)], 1, settings, step=0))
    assert void_table(groups) == [("timeout", 1)]


def test_cancellation_leaves_no_task_and_closes_every_trace():
    async def steps():
        policy = FakePolicy(lambda *_: asyncio.sleep(30))
        async with await serve(policy.app) as gateway, await serve(build_app(ECHO)) as server:
            policy.url = gateway.url
            async with connect_task_app(server.url) as app:
                before = asyncio.all_tasks()
                settings = replace(SETTINGS, max_concurrent=3)
                work = asyncio.create_task(run_groups(app, policy, [Problem(0), Problem(1)], 2, settings, step=0))
                async with asyncio.timeout(5):
                    while policy.running < 3:
                        await asyncio.sleep(0.01)
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
                assert len(policy.opened) == 3  # the fourth never got a slot
                assert sorted(policy.closed) == [trace for trace, _ in policy.opened]
                assert not {task for task in asyncio.all_tasks() - before if "member" in str(task.get_coro())}

    asyncio.run(steps())


def test_rol_18_a_fault_of_a_callback_is_raised_itself():
    """Failures surfaced as an opaque 'unhandled errors in a TaskGroup'."""

    def broken(i, trajectory):
        raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        run(build_app(ECHO), lambda *_: "1", [1], 2, on_done=broken)


def test_app_down_is_void_after_all_attempts():
    async def steps():
        async with await serve(FastAPI()) as server:
            pass
        async with connect_task_app(server.url) as app:
            return await run_groups(app, FakePolicy(lambda *_: "1"), [Problem(1)], 3, SETTINGS, step=0)

    assert void_table(asyncio.run(steps())) == [("unreachable", 3)]


def test_no_problems_no_groups():
    groups, policy, _ = run(build_app(ECHO), lambda *_: "1", [], 4)
    assert (groups, policy.opened) == ((), [])


@pytest.mark.parametrize(
    "change",
    [
        {"max_attempts": 0},
        {"max_concurrent": 0},
        {"max_turns": 0},
        {"timeout_s": 0.0},
        {"timeout_s": math.nan},
        {"backoff_s": ()},
    ],
)
def test_settings_name_what_is_wrong(change):
    with pytest.raises(ValueError, match=rf"rollout\.{next(iter(change))}="):
        replace(SETTINGS, **change)


def test_a_reward_after_an_engine_failure_is_void_and_an_overflow_is_a_cut():
    """A task app that swallows the engine's error must not turn an outage into a reward; an outgrown context keeps its own."""

    class Scripted(FakePolicy):
        def open(self, sampling):
            trace_id, url = super().open(sampling)
            self.turns[trace_id].append(Turn((1,), (2,), (-0.5,), (0,), "stop"))
            return trace_id, url

    class App:
        async def rollout(self, request):
            return {"reward": 1.0}

    def play(prepare):
        policy = Scripted(lambda *_: "x")
        prepare(policy)
        settings = RolloutSettings("e", "p", "m", SamplingParams(4), max_attempts=1)
        return asyncio.run(run_groups(App(), policy, [Problem(0)], 1, settings, step=0))[0].trajectories[0]

    broken = play(lambda p: p.failures.update(trace_0000="engine died"))
    assert (broken.status, broken.reward, broken.reason) == ("void", None, "engine_failed")
    grown = play(lambda p: p.overflows.update(trace_0000="too long"))
    assert (grown.status, grown.reward, grown.reason) == ("cut", 1.0, "context")
