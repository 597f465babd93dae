import asyncio
import json
import math
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from rollout_fakes import hand_written

from rollout import client, server
from rollout.client import TaskAppError, build_request, connect_task_app, preflight
from rollout.replies import ReplyError, parse_reply
from rollout.server import serve
from rollout.task_app import Task, build_app
from rollout.types import Problem, SamplingParams

DATA = Path(__file__).parent / "data"
KEY = "sk_env_0123456789abcdef"
TRACE = "trace_demo0001"


def call(app, use, **options):
    """What `use(task_app)` returns against `app` on a real socket."""

    async def run():
        async with await serve(app) as running, connect_task_app(running.url, **options) as task_app:
            return await use(task_app)

    return asyncio.run(run())


def failure(app, use=lambda task_app: task_app.rollout({}), **options):
    with pytest.raises(TaskAppError) as caught:
        call(app, use, **options)
    return caught.value


def answering(response):
    return hand_written(lambda body: response)


# transport and status


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (400, "invalid_request", False),
        (401, "unauthorised", False),
        (403, "unauthorised", False),
        (404, "not_found", False),
        (422, "invalid_request", False),
        (429, "rate_limited", True),
        (500, "server_error", True),
        (503, "server_error", True),
    ],
)
def test_status_decides_reason_and_retry(status, reason, retryable):
    error = failure(answering(JSONResponse({"detail": {"error": {"code": "odd", "message": "x" * 999}}}, status_code=status)))
    assert (error.reason, error.retryable, error.status) == (reason, retryable, status)
    assert f"answered {status}: odd: xxx" in str(error)
    assert "127.0.0.1" in str(error)
    assert len(str(error)) < 420


def test_rol_01_an_app_that_says_retrying_is_useless_is_believed():
    """A deterministic error was treated as transient."""
    body = {"error": {"type": "overlong_prompt", "retryable": False}}
    error = failure(answering(JSONResponse(body, status_code=500)))
    assert (error.reason, error.retryable) == ("server_error", False)
    assert "overlong_prompt" in str(error)


def test_wrong_key_is_unauthorised_and_echoed_prefixes_are_removed():
    leaking = {"code": "unauthorised", "message": f"invalid; got {KEY} allowed_first15 {KEY[:15]}"}
    error = failure(answering(JSONResponse({"detail": {"error": leaking}}, status_code=400)), api_key=KEY)
    assert (error.reason, error.retryable) == ("unauthorised", False)
    assert KEY[:15] not in str(error)


def test_validation_errors_name_their_place():
    detail = [{"type": "missing", "loc": ["body", "env"], "msg": "Field required", "input": {}}]
    assert "body.env: Field required" in str(failure(answering(JSONResponse({"detail": detail}, status_code=422))))


def test_app_down_is_unreachable():
    async def run():
        async with await serve(answering({})) as running:
            pass
        async with connect_task_app(running.url) as app:
            await app.health()

    with pytest.raises(TaskAppError, match=r"GET /health of the task app at http://127\.0\.0\.1") as caught:
        asyncio.run(run())
    assert (caught.value.reason, caught.value.retryable) == ("unreachable", True)


@asynccontextmanager
async def raw_server(answer):
    """The URL of a socket whose connections `answer(writer)` serves; they are over and closed when the block ends."""
    handlers = set()

    async def handle(reader, writer):
        handlers.add(asyncio.current_task())
        try:
            await answer(writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listener:
        try:
            yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            for handler in handlers:
                handler.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)


def raw_failure(answer, **connection) -> TaskAppError:
    async def run():
        async with raw_server(answer) as url, connect_task_app(url, **connection) as app:
            await app.rollout({})

    with pytest.raises(TaskAppError) as caught:
        asyncio.run(run())
    return caught.value


def test_slow_app_times_out_even_when_it_trickles():
    async def trickle(writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(40):
            writer.write(b" ")
            await asyncio.sleep(0.05)

    error = raw_failure(trickle, timeout_s=0.3)
    assert "no answer within 0.3 s" in str(error)
    assert (error.reason, error.retryable) == ("timeout", True)


def test_dropped_connection_is_retryable():
    async def drop(writer):
        writer.close()

    error = raw_failure(drop)
    assert (error.reason, error.retryable) == ("disconnected", True)


@pytest.mark.parametrize("text", ["<html>", "", "{'a': 1}"])
def test_what_is_not_json_is_not_a_reply(text):
    error = failure(answering(PlainTextResponse(text)))
    assert (error.reason, error.retryable, error.status) == ("not_json", False, 200)


def test_all_three_key_headers_and_extra_ones_are_sent():
    app = FastAPI()

    @app.get("/health")
    async def health(request: Request):
        return dict(request.headers)

    sent = call(app, lambda task_app: task_app.health(), api_key=KEY, headers={"x-tunnel": "t"})
    assert (sent["x-api-key"], sent["x-api-keys"], sent["authorization"], sent["x-tunnel"]) == (KEY, KEY, f"Bearer {KEY}", "t")


def test_redirects_are_followed_at_home_and_refused_abroad():
    app = FastAPI()
    visited = []

    @app.get("/health")
    async def health():
        return RedirectResponse("/healthy")

    @app.get("/healthy")
    async def healthy():
        return {"healthy": True}

    @app.post("/rollout")
    async def rollout():
        visited.append("rollout")
        return RedirectResponse("http://localhost:1/rollout", status_code=307)

    assert call(app, lambda task_app: task_app.health()) == {"healthy": True}
    error = failure(app, api_key=KEY)
    assert (error.reason, error.retryable, visited) == ("redirect", False, ["rollout"])
    assert "localhost" in str(error)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_urls_are_checked_before_use(url):
    async def run():
        async with connect_task_app(url):
            pass

    with pytest.raises(ValueError, match="task app URL"):
        asyncio.run(run())


def test_a_key_with_a_newline_is_refused_without_being_shown():
    async def run():
        async with connect_task_app("http://127.0.0.1:1", api_key=KEY + "\n"):
            pass

    with pytest.raises(ValueError, match="header X-API-Key must be printable ASCII") as caught:
        asyncio.run(run())
    assert KEY not in str(caught.value)


def test_rol_03_the_pool_is_as_wide_as_the_concurrency():
    """Throughput came in waves above 100 concurrent rollouts, the default pool limit."""
    wanted = 120
    inside = 0
    full = asyncio.Event()

    async def answer(body):
        nonlocal inside
        inside += 1
        if inside == wanted:
            full.set()
        await full.wait()  # nobody is answered before everybody is inside
        return {}

    async def use(task_app):
        return await asyncio.wait_for(asyncio.gather(*(task_app.rollout({}) for _ in range(wanted))), 20)

    assert call(hand_written(answer), use, concurrency=wanted) == [{}] * wanted


def test_rol_05_the_client_forgets_idle_sockets_before_the_server_closes_them():
    """Random 'server disconnected' on idle connections."""
    assert client.KEEP_ALIVE_S * 2 <= server.KEEP_ALIVE_S

    async def run():
        async with await serve(build_app(Task(lambda p: "x", lambda t, p: 1.0))) as running:
            assert running._uvicorn.config.timeout_keep_alive == server.KEEP_ALIVE_S
            async with connect_task_app(running.url) as app:
                await app.health()
                pool = app._http._transport._pool  # type: ignore[attr-defined]
                assert pool._keepalive_expiry == client.KEEP_ALIVE_S

    asyncio.run(run())


# request and preflight


def keys(value, prefix=""):
    if not isinstance(value, dict):
        return set()
    return {prefix + name for name in value} | {key for name, item in value.items() for key in keys(item, f"{prefix}{name}.")}


def test_request_is_the_recorded_superset():
    recorded = json.loads((DATA / "rollout_request.json").read_text())
    config = {name: recorded["env"]["config"][name] for name in ("env_params", "step_rewards")}
    request = build_request(
        Problem(7, "test", {"level": 2}),
        TRACE,
        recorded["policy"]["config"]["inference_url"],
        env_name="gather",
        policy_name="gather-react",
        model="Qwen/Qwen3-0.6B",
        max_turns=4,
        sampling=SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95),
        env_config={**config, "level": 1, "split": "ignored"},
        policy_config={"thinking": False, "model": "ignored"},
        timeout_s=599.5,
        session_id="rl_demo",
    )
    assert keys(recorded) - keys(request) == {"synth_base_url"}
    assert request["env"]["config"] == {**config, "level": 2, "max_turns": 4, "split": "test"}
    assert request["policy"]["config"] == {**recorded["policy"]["config"], "thinking": False}
    for same in ("run_id", "mode", "ops", "record", "on_done", "safety", "training_session_id"):
        assert request[same] == recorded[same]


def test_preflight_returns_the_task_set():
    app = build_app(Task(lambda p: "x", lambda t, p: 1.0, name="t", splits={"train": 3}), (KEY,))
    assert call(app, preflight, api_key=KEY) == {"id": "t", "splits": ["train"], "sizes": {"train": 3}}


def test_preflight_says_what_to_do():
    error = failure(build_app(Task(lambda p: "x", lambda t, p: 1.0), (KEY,)), preflight, api_key="sk_env_wrong")
    assert error.reason == "unauthorised"
    assert "Set ENVIRONMENT_API_KEY" in str(error)
    assert "/health, /task_info and /rollout" in str(failure(hand_written(lambda body: {}), preflight))


def test_preflight_does_not_take_a_healthy_answer_for_a_valid_key():
    app = FastAPI()
    app.add_api_route("/health", lambda: {"authorized": False, "expected_api_key_prefix": "sk_env"})
    refused = JSONResponse({"detail": {"error": {"code": "unauthorised", "message": "no"}}}, status_code=400)
    app.add_api_route("/task_info", lambda: refused, response_model=None)
    assert failure(app, preflight, api_key="sk_env_wrong").reason == "unauthorised"


def test_preflight_wants_a_taskset():
    app = FastAPI()
    app.add_api_route("/health", lambda: {"healthy": True})
    app.add_api_route("/task_info", lambda: {"task": {}})
    assert failure(app, preflight).reason == "invalid_reply"


# replies


def test_recorded_v2_and_v4_replies():
    v2 = parse_reply(json.loads((DATA / "reply_v2.json").read_text()), TRACE, 3)
    assert (v2.reward, v2.turn_rewards) == (3.0, (1.0, 1.0, 1.0))  # three items gathered, 1 each
    assert (v2.raw["outcome_score"], v2.raw["mean_return"]) == (1.0, 3.0)
    v4 = parse_reply(json.loads((DATA / "reply_v4.json").read_text()), TRACE, 3)
    assert (v4.reward, v4.turn_rewards, v4.aborted) == (1.0, (1.0, 1.0, 1.0), False)


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ({"metrics": {"outcome_objectives": {"reward": 1}, "outcome_reward": 2, "mean_return": 3}}, 1.0),
        ({"metrics": {"outcome_reward": 2, "episode_returns": [3], "mean_return": 3}}, 2.0),
        ({"reward_info": {"outcome_reward": 0.5}}, 0.5),
        ({"metrics": {"mean_return": 9}, "reward_info": {"outcome_reward": 0.5}}, 0.5),
        ({"metrics": {"episode_returns": [3], "mean_return": 4}}, 3.0),
        ({"metrics": {"mean_return": 0.25}, "artifacts": []}, 0.25),
        ({"metrics": {"total_reward": 5, "outcome_score": 1}}, 5.0),
        ({"metrics": {"outcome_score": -1}}, -1.0),
        ({"metrics": {"reward_mean": 6, "episode_rewards": [7]}}, 6.0),
        ({"metrics": {"episode_rewards": [7]}}, 7.0),
        ({"metrics": {}, "trajectories": [{"episode_return": 8, "steps": [{"reward": 1}]}]}, 8.0),
        ({"metrics": None, "trajectories": [{"steps": [{"reward": 1}, {"reward": None}, {"reward": 0.5}]}]}, 1.5),
        ({"metrics": {"outcome_reward": 0, "mean_return": 1}}, 0.0),
    ],
)
def test_precedence_of_rewards(body, reward):
    assert parse_reply(body, TRACE, 1).reward == reward


def test_rol_17_a_bare_reward_is_the_trained_reward():
    """The environment computed a reward that training never used."""
    assert parse_reply({"reward": 0.7}, TRACE, 1).reward == 0.7


def test_tok_19_bare_assistant_messages_are_rejected_at_the_boundary():
    """Assistant messages without token data led to an empty training step."""
    with pytest.raises(ReplyError, match=r"JSON array, expected an object with 'metrics\.outcome_reward'") as caught:
        parse_reply([{"role": "assistant", "content": "hi"}], TRACE, 0)
    assert caught.value.reason == "not_an_object"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "no_reward"),
        ({"metrics": {"outcome_reward": None}}, "no_reward"),
        ({"metrics": {"outcome_reward": None, "event_rewards": [1.0]}}, "no_reward"),
        ({"metrics": {"outcome_reward": math.nan, "mean_return": 1}}, "nan_reward"),
        ({"metrics": {"outcome_reward": -math.inf}}, "nan_reward"),
        ({"metrics": {"outcome_reward": 10**400}}, "nan_reward"),
        ({"metrics": {"outcome_reward": True, "mean_return": 1}}, "invalid_reward"),
        ({"metrics": {"outcome_reward": "1.0"}}, "invalid_reward"),
        ({"metrics": {"episode_returns": [1, 2]}}, "several_episodes"),
        ({"trajectories": [{"episode_return": 1}, {"episode_return": 2}]}, "several_episodes"),
        ({"trajectories": [{"steps": [{"reward": False}]}]}, "invalid_reward"),
        ({"metrics": {"outcome_reward": 1}, "trace_correlation_id": "trace_other"}, "correlation_mismatch"),
        ({"metrics": {"outcome_reward": 1}, "run_id": "trace_other"}, "correlation_mismatch"),
        (
            {
                "metrics": {"mean_return": 1},
                "trajectories": [{"inference_url": "http://h/v1?cid=trace_other/v1/chat/completions"}],
            },
            "correlation_mismatch",
        ),
        (None, "not_an_object"),
    ],
)
def test_replies_without_a_trustworthy_reward(body, reason):
    with pytest.raises(ReplyError) as caught:
        parse_reply(body, TRACE, 1)
    assert caught.value.reason == reason
    if reason == "no_reward":
        assert "outcome_reward" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"trace_correlation_id": TRACE, "run_id": "of the app"},
        {"pipeline_metadata": {"trace_correlation_id": TRACE}},
        {"trajectories": [{"inference_url": f"http://h/t/{TRACE}/v1?cid=trace_old"}]},
        {"trajectories": [{"inference_url": f"http://h/v1?cid={TRACE}/v1/chat/completions"}]},
        {"trajectories": [{"inference_url": "http://[broken"}]},
        {"run_id": TRACE},
    ],
)
def test_first_correlation_found_counts(body):
    assert parse_reply({"metrics": {"mean_return": 1}, **body}, TRACE, 1).reward == 1.0


def test_turn_rewards_need_one_finite_number_per_recorded_call():
    body = {
        "metrics": {"outcome_reward": 1, "event_rewards": [1, 2]},
        "trajectories": [{"steps": [{"reward": r} for r in (3, 4, 5)]}],
    }
    assert parse_reply(body, TRACE, 2).turn_rewards == (1.0, 2.0)
    later = parse_reply(body, TRACE, 3)
    assert later.turn_rewards == (3.0, 4.0, 5.0)
    assert later.notes == ("event_rewards ignored: 2 finite values of 2 for 3 model calls",)
    neither = parse_reply(body, TRACE, 4)
    assert (neither.turn_rewards, len(neither.notes)) == (None, 2)
    body = {"metrics": {"outcome_reward": 1, "event_rewards": [1, math.nan]}}
    assert parse_reply(body, TRACE, 2).turn_rewards is None
    body = {"metrics": {"outcome_reward": 1}, "trajectories": [{"decision_samples": [{"r_i": 0.5}]}]}
    assert parse_reply(body, TRACE, 1).turn_rewards == (0.5,)


def test_aborted_has_no_reward():
    reply = parse_reply({"aborted": True, "metrics": {"mean_return": 1}}, TRACE, 1)
    assert (reply.aborted, reply.reward, reply.raw) == (True, None, {"mean_return": 1.0})


def test_cli_05_a_failed_post_is_retryable_and_its_plain_text_is_shown():
    """A reply of 503 with a text body must neither crash a client that expects JSON nor hide what the server said."""
    error = failure(answering(PlainTextResponse("upstream error", status_code=503)))
    assert error.retryable
    assert error.reason == "server_error"
    assert "upstream error" in str(error)
