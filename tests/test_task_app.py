import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from rollout_fakes import FakePolicy

from rollout.apps import arithmetic
from rollout.inference import chat_url
from rollout.replies import parse_reply
from rollout.server import STOP_TIMEOUT_S, serve
from rollout.task_app import Env, Task, TaskFileError, build_app, load_task_file, main
from rollout.types import Problem, SamplingParams

REQUEST = json.loads((Path(__file__).parent / "data" / "rollout_request.json").read_text())
KEY = "sk_env_0123456789abcdef"
ECHO = Task(lambda problem: f"seed {problem.seed}", lambda text, problem: float(len(text)), name="echo", splits={"train": 8})


def request_for(url, **changes):
    body = json.loads(json.dumps(REQUEST))
    body["policy"]["config"]["inference_url"] = url
    body["env"]["config"].update(changes.pop("config", {}))
    body["env"].update(changes.pop("env", {}))
    return {**body, **changes}


def rollouts(task, script, *changes):
    """`(responses, fake policy)`: one rollout of `task` per item of `changes` to the recorded request, over real sockets."""

    async def run():
        policy = FakePolicy(script)
        gateway, app = await asyncio.gather(serve(policy.app), serve(build_app(task)))
        policy.url = gateway.url
        responses = []
        async with httpx.AsyncClient(timeout=10, trust_env=False, verify=False) as http:
            for change in changes:
                _, url = policy.open(SamplingParams(max_tokens=64))
                responses.append(await http.post(f"{app.url}/rollout", json=request_for(url, **change)))
        await asyncio.gather(gateway.aclose(), app.aclose())
        return responses, policy

    return asyncio.run(run())


def rollout(task, script, **changes):
    (response,), policy = rollouts(task, script, changes)
    return response, policy


def gets(app, *calls):
    """The responses of GET `(path, headers)` for each call, from one server."""

    async def run():
        async with await serve(app) as server, httpx.AsyncClient(timeout=10, trust_env=False, verify=False) as http:
            return [await http.get(server.url + path, headers=headers) for path, headers in calls]

    return asyncio.run(run())


def error(response):
    return response.json()["detail"]["error"]


# server


def test_port_is_free_again_after_close_and_signals_stay_ours():
    async def run():
        before = signal.getsignal(signal.SIGTERM)
        async with await serve(build_app(ECHO)) as server:
            assert signal.getsignal(signal.SIGTERM) is before
            async with httpx.AsyncClient(trust_env=False, verify=False) as http:
                assert (await http.get(server.url)).status_code == 200
                await server.aclose()  # with an idle keep-alive connection open
        async with await serve(build_app(ECHO), port=server.port) as again:
            assert again.port == server.port
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_taken_port_is_named():
    async def run():
        async with await serve(build_app(ECHO)) as server:
            with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}.*choose another port"):
                await serve(build_app(ECHO), port=server.port)

    asyncio.run(run())


def test_close_is_bounded_when_a_request_hangs():
    async def run():
        app = FastAPI()
        entered = asyncio.Event()

        @app.get("/")
        async def hang():
            entered.set()
            await asyncio.sleep(60)

        async with await serve(app) as server, httpx.AsyncClient(trust_env=False, verify=False) as http:
            call = asyncio.create_task(http.get(server.url, timeout=30))
            await entered.wait()
            start = time.monotonic()
            await server.aclose()
            assert time.monotonic() - start < STOP_TIMEOUT_S + 1.5
            with pytest.raises(httpx.HTTPError):
                (await call).raise_for_status()

    asyncio.run(run())


def test_failed_startup_is_an_error_not_an_exit():
    @asynccontextmanager
    async def broken(app):
        raise ValueError("no database")
        yield

    with pytest.raises(RuntimeError, match="lifespan startup failed"):
        asyncio.run(serve(FastAPI(lifespan=broken)))


# endpoints and keys


def test_key_is_accepted_in_any_header():
    accepted = (
        {"X-API-Key": KEY},
        {"X-API-Keys": f"other, {KEY}"},
        {"Authorization": f"Bearer {KEY}"},
        {"X-API-Key": "no", "X-API-Keys": KEY},
    )
    for response in gets(build_app(ECHO, (KEY,)), *(("/health", headers) for headers in accepted)):
        assert response.json() == {"healthy": True, "auth": {"required": True}}, response.request.headers


def test_wrong_key_is_400_and_leaks_nothing():
    wrong = ({}, {"X-API-Key": KEY[:-1]}, {"Authorization": f"Basic {KEY}"}, {"X-API-Key": ""})
    calls = [(path, headers) for path in ("/health", "/task_info", "/info") for headers in wrong]
    for response in gets(build_app(ECHO, (KEY,)), *calls):
        assert (response.status_code, error(response)["code"]) == (400, "unauthorised"), response.request.headers
        assert KEY[:8] not in response.text


def test_root_needs_no_key_and_health_is_open_without_keys():
    async def head():
        async with await serve(build_app(ECHO, (KEY,))) as server, httpx.AsyncClient(trust_env=False, verify=False) as http:
            return (await http.head(server.url)).status_code

    assert gets(build_app(ECHO, (KEY,)), ("/", {}))[0].json() == {"status": "ok", "service": "echo"}
    assert asyncio.run(head()) == 200
    assert gets(build_app(ECHO), ("/health", {}))[0].json()["auth"] == {"required": False}
    with pytest.raises(ValueError, match="empty key"):
        build_app(ECHO, ("",))


def test_task_info_without_one_and_with_several_seeds():
    paths = ("/task_info", "/task_info?seed=7", "/task_info?seed=7&seed=8", "/task_info?seeds=7&seeds=8")
    none, one, two, plural = (response.json() for response in gets(build_app(ECHO), *((path, {}) for path in paths)))
    assert none == {"taskset": {"id": "echo", "splits": ["train"], "sizes": {"train": 8}}}
    assert one["dataset"]["index"] == 7
    assert [info["dataset"]["index"] for info in two] == [info["dataset"]["index"] for info in plural] == [7, 8]


def test_several_tasks_are_selected_by_env_name():
    tasks = {name: Task(lambda p: "x", lambda t, p, v=value: v, name=name) for name, value in (("a", 1.0), ("b", 2.0))}
    (known, unknown), _ = rollouts(tasks, lambda *_: "y", {"env": {"env_name": "b"}}, {"env": {"env_name": "c"}})
    assert known.json()["metrics"]["outcome_reward"] == 2.0
    assert unknown.status_code == 404
    assert "known: a, b" in error(unknown)["message"]
    every, one = gets(build_app(tasks), ("/task_info", {}), ("/task_info?env_name=b", {}))
    assert set(every.json()["taskset"]["tasks"]) == {"a", "b"}
    assert one.json()["taskset"]["id"] == "b"


# one rollout


def test_rollout_calls_the_policy_as_an_openai_client_and_satisfies_every_reader():
    task = Task(lambda p: f"seed {p.seed}", lambda text, p: 0.5 * len(text), name="echo", system="be brief")
    response, policy = rollout(task, lambda *_: "four")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "seed 7"}]
    sampling = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 64}
    assert policy.bodies == [{"model": "Qwen/Qwen3-0.6B", "messages": messages, **sampling}]
    reply = response.json()
    assert (
        reply["run_id"]
        == reply["trace_correlation_id"]
        == reply["pipeline_metadata"]["trace_correlation_id"]
        == "trace_demo0001"
    )
    assert reply["pipeline_metadata"]["inference_url"].endswith("/t/trace_0000/v1/chat/completions?cid=trace_0000")
    (trajectory,) = reply["trajectories"]
    (step,) = trajectory["steps"]
    assert (trajectory["length"], step["reward"], step["done"], step["output"]) == (1, 2.0, True, "four")
    metrics = reply["metrics"]
    assert metrics["episode_returns"] == metrics["event_rewards"] == [2.0]
    assert metrics["mean_return"] == metrics["outcome_reward"] == metrics["outcome_score"] == 2.0
    assert (metrics["num_steps"], metrics["outcome_objectives"], reply["aborted"]) == (1, {"reward": 2.0}, False)
    assert reply["reward_info"]["outcome_reward"] == 2.0


def test_problem_factory_and_async_functions():
    async def prompt(problem):
        return [{"role": "user", "content": problem}]

    async def reward(text, problem):
        return float(text == problem)

    task = Task(prompt, reward, problem=lambda seed, split: f"{split}-{seed}")
    response, policy = rollout(task, lambda *_: "test-7", config={"split": "test"})
    assert policy.bodies[0]["messages"] == [{"role": "user", "content": "test-7"}]
    assert response.json()["metrics"]["outcome_reward"] == 1.0


def test_default_problem_carries_seed_split_and_config():
    seen = []
    task = Task(lambda p: seen.append(p) or "x", lambda text, p: 1.0)
    rollout(task, lambda *_: "y", config={"level": 3})
    assert isinstance(seen[0], Problem)
    assert (seen[0].seed, seen[0].split, seen[0].config["level"]) == (7, "train", 3)


@pytest.mark.parametrize(
    ("reward", "code"),
    [(None, "reward_missing"), (float("nan"), "reward_not_finite"), (True, "reward_invalid"), ("1.0", "reward_invalid")],
)
def test_jdg_01_a_reward_that_is_no_number_is_an_error_never_zero(reward, code):
    """A failed reward and an honest 0 both became 0.0."""
    response, _ = rollout(Task(lambda p: "x", lambda text, p: reward), lambda *_: "y")
    assert (response.status_code, error(response)["code"]) == (500, code)
    assert "metrics" not in response.json()


def test_jdg_01_an_honest_zero_is_a_reward():
    """The only one of the four that trains as 0."""
    honest, _ = rollout(Task(lambda p: "x", lambda text, p: 0), lambda *_: "y")
    assert honest.json()["metrics"]["outcome_reward"] == 0.0


def test_other_numbers_beside_the_reward_reach_the_trainer_as_metrics():
    """Shaped rewards hid whether an answer was right; a task may say both, and the others never add to the reward."""
    task = Task(lambda p: "x", lambda text, p: {"reward": 0.7, "correct": 1, "length": float(len(text))})
    body = rollout(task, lambda *_: "four")[0].json()
    reply = parse_reply(body, body["trace_correlation_id"], 1)
    assert (reply.reward, reply.turn_rewards) == (0.7, (0.7,))
    assert (reply.raw["objective_correct"], reply.raw["objective_length"]) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("scores", "code"),
    [({"correct": 1.0}, "reward_missing"), ({"reward": 1.0, "correct": None}, "reward_missing"),
     ({"reward": 1.0, "correct": float("inf")}, "reward_not_finite"), ({"reward": 1.0, "correct": "yes"}, "reward_invalid")],
)  # fmt: skip
def test_a_number_that_is_none_is_an_error_like_a_reward(scores, code):
    response, _ = rollout(Task(lambda p: "x", lambda text, p: scores), lambda *_: "y")
    assert (response.status_code, error(response)["code"]) == (500, code)


def test_a_reward_that_raises_is_named_and_hides_keys():
    def reward(text, problem):
        raise KeyError(KEY)

    async def run():
        policy = FakePolicy(lambda *_: "y")
        async with await serve(policy.app) as gateway, await serve(build_app(Task(lambda p: "x", reward), (KEY,))) as app:
            body = request_for(f"{gateway.url}/t/trace_1/v1")
            async with httpx.AsyncClient(trust_env=False, verify=False, headers={"X-API-Key": KEY}) as http:
                return await http.post(f"{app.url}/rollout", json=body)

    response = asyncio.run(run())
    assert (response.status_code, error(response)["code"]) == (500, "reward_failed")
    assert "KeyError" in response.text
    assert KEY not in response.text


def test_bad_requests_are_named():
    bad = [
        ({"config": {"max_turns": 0}}, 422, "invalid_max_turns"),
        ({"config": {"max_turns": True}}, 422, "invalid_max_turns"),
        ({"config": {"split": "exam"}}, 422, "unknown_split"),
        ({"run_id": None, "trace_correlation_id": None}, 422, "missing_trace_id"),
        ({"policy": {"config": {}}}, 422, "missing_inference_url"),
        ({"policy": {"config": {"inference_url": "file:///etc/passwd"}}}, 422, "invalid_inference_url"),
        ({"policy": {"config": {"inference_url": "http://127.0.0.1:1/v1"}}}, 502, "inference_upstream_error"),
    ]
    responses, policy = rollouts(ECHO, lambda *_: "y", *(changes for changes, _, _ in bad))
    assert [(r.status_code, error(r)["code"]) for r in responses] == [(status, code) for _, status, code in bad]
    assert policy.bodies == []


def test_missing_seed_is_422_with_its_place():
    body = {key: value for key, value in REQUEST["env"].items() if key != "seed"}
    response, _ = rollout(ECHO, lambda *_: "y", env={"seed": None, **body})
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "env", "seed"]


def test_a_failing_policy_is_502_and_never_a_reward():
    script = [503, 500, 429, 410, *map(JSONResponse, ({}, {"choices": []}, {"choices": [{"message": {"content": 5}}]}, []))]
    responses, _ = rollouts(ECHO, lambda trace, *_: script[int(trace[-4:])], *[{}] * len(script))
    assert {(r.status_code, error(r)["code"]) for r in responses} == {(502, "inference_upstream_error")}
    assert [error(r)["retryable"] for r in responses] == [True, True, True, False, True, True, True, True]
    assert not any("/t/" in r.text for r in responses)  # the path of an inference URL is its password


def test_an_episode_has_a_deadline():
    async def slow(*_):
        await asyncio.sleep(5)

    response, _ = rollout(ECHO, slow, safety={"max_time_s": 0.2})
    assert (response.status_code, error(response)["code"]) == (504, "rollout_timeout")


def test_rol_04_a_caller_that_hangs_up_stops_the_generation():
    """The server kept generating for clients that had gone."""

    async def run():
        started = asyncio.Event()

        async def slow(*_):
            started.set()
            await asyncio.sleep(30)

        policy = FakePolicy(slow)
        async with await serve(policy.app) as gateway, await serve(build_app(ECHO)) as app:
            url = f"{gateway.url}/t/trace_1/v1"
            async with httpx.AsyncClient(trust_env=False, verify=False) as http:
                call = asyncio.create_task(http.post(f"{app.url}/rollout", json=request_for(url), timeout=30))
                await asyncio.wait_for(started.wait(), 5)
                assert any("play_request" in str(task.get_coro()) for task in asyncio.all_tasks())
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                async with asyncio.timeout(2):
                    while any("play_request" in str(task.get_coro()) for task in asyncio.all_tasks()):
                        await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "posted"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/t/trace_1/v1/chat/completions?cid=trace_1", "http://h:1/t/trace_1/v1/chat/completions?cid=trace_1"),
        ("http://h:1/v1?cid=trace_1", "http://h:1/v1/chat/completions?cid=trace_1"),
    ],
)
def test_chat_url_keeps_the_query(given, posted):
    assert chat_url(given) == posted


# several turns


def counting(goal):
    def reset(seed, split, config):
        return seed, [{"role": "user", "content": f"start {seed}"}]

    def step(state, message):
        state += int(message["content"])
        return state, [{"role": "user", "content": f"now {state}"}], float(message["content"]), state >= goal

    return Env(reset, step, name="counting", tools=({"type": "function", "function": {"name": "noop"}},))


def test_env_runs_until_done_and_sums_turn_rewards():
    response, policy = rollout(counting(12), lambda trace, turn, body: str(turn + 1))  # 7 + 1 + 2 + 3 >= 12
    metrics = response.json()["metrics"]
    assert (metrics["event_rewards"], metrics["outcome_reward"], metrics["num_steps"]) == ([1.0, 2.0, 3.0], 6.0, 3)
    assert metrics["details"]["truncated"] is False
    contents = [message["content"] for message in policy.bodies[2]["messages"]]
    assert contents == ["start 7", "1", "now 8", "2", "now 10"]
    assert policy.bodies[0]["tools"][0]["function"]["name"] == "noop"


def test_rol_15_turn_limit_and_length_still_score():
    """Answers cut by the limit lost the reward that they had earned."""
    response, policy = rollout(counting(99), lambda *_: ("1", "length"), config={"max_turns": 2})
    metrics = response.json()["metrics"]
    assert (len(policy.bodies), metrics["outcome_reward"], metrics["details"]["truncated"]) == (2, 2.0, True)


def test_rol_14_a_conversation_that_outgrows_the_model_keeps_its_turns():
    """Long conversations were thrown away as errors."""
    full = JSONResponse({"error": {"code": "context_length_exceeded", "message": "530 > 512"}}, status_code=400)
    response, _ = rollout(counting(99), lambda trace, turn, body: full if turn == 2 else "1")
    metrics = response.json()["metrics"]
    assert (metrics["event_rewards"], metrics["details"]["truncated"]) == ([1.0, 1.0], True)
    response, _ = rollout(counting(99), lambda *_: full)
    assert (response.status_code, error(response)["code"], error(response)["retryable"]) == (400, "prompt_too_long", False)


def test_a_step_of_the_wrong_shape_is_named():
    env = Env(lambda seed, split, config: (0, []), lambda state, message: (state, [], 1.0))
    response, _ = rollout(env, lambda *_: "y")
    assert (response.status_code, error(response)["code"]) == (500, "step_invalid")


# task files


def test_task_files(tmp_path):
    def load(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return load_task_file(path)

    assert load("from rollout.task_app import Task\ntask = Task(lambda p: 'x', lambda t, p: 1.0, name='mine')").name == "mine"
    assert isinstance(load("from fastapi import FastAPI\napp = FastAPI()"), FastAPI)
    with pytest.raises(TaskFileError, match="must define `task = Task"):
        load("x = 1")
    with pytest.raises(TaskFileError, match="it has task: int"):
        load("task = 1")
    with pytest.raises(TaskFileError, match=r"ModuleNotFoundError.*nowhere"):
        load("import nowhere")
    with pytest.raises(TaskFileError, match="does not exist"):
        load_task_file(tmp_path / "missing.py")


def test_command_refuses_what_it_cannot_serve(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ENVIRONMENT_API_KEY", raising=False)
    monkeypatch.delenv("ENVIRONMENT_API_KEY_ALIASES", raising=False)
    assert main([str(tmp_path / "missing.py")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main([arithmetic.__file__, "--host", "0.0.0.0"]) == 2
    assert "ENVIRONMENT_API_KEY" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([arithmetic.__file__, "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_command_serves_until_interrupted():
    command = [sys.executable, "-m", "rollout.task_app", arithmetic.__file__, "--port", "0"]
    environment = {"PATH": "", "ENVIRONMENT_API_KEY": "first", "ENVIRONMENT_API_KEY_ALIASES": "second,third"}
    root = Path(arithmetic.__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            answers = [
                httpx.get(f"{url}/task_info", headers={"X-API-Key": key}, trust_env=False) for key in ("third", "fourth")
            ]
            assert [answer.status_code for answer in answers] == [200, 400]
            assert answers[0].json()["taskset"]["id"] == "addition"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()


# bundled arithmetic


@pytest.mark.parametrize("name", sorted(arithmetic.TASKS))
def test_splits_share_no_unordered_problem_and_seeds_repeat(name):
    task = arithmetic.TASKS[name]()
    assert task.problem is not None
    assert task.splits is not None
    asked = {split: [task.problem(seed, split).numbers for seed in range(size)] for split, size in task.splits.items()}
    unordered = {split: {tuple(sorted(numbers)) for numbers in problems} for split, problems in asked.items()}
    assert not unordered["train"] & unordered["test"]
    for split, size in task.splits.items():
        assert len(set(asked[split])) == size  # each written problem once
        assert task.problem(size, split) == task.problem(0, split)
    share = len(unordered["test"]) / (len(unordered["train"]) + len(unordered["test"]))
    assert abs(share - 0.25) < 0.02


def test_all_81_single_digit_sums_are_asked():
    task = arithmetic.addition()
    assert task.splits is not None
    assert task.problem is not None
    questions = [task.problem(seed, split) for split, size in task.splits.items() for seed in range(size)]
    assert {q.numbers: q.answer for q in questions} == {(a, b): a + b for a in range(1, 10) for b in range(1, 10)}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("15", 1.0),
        ("7 + 8 = 15.", 1.0),
        ("It is 15, not 16", 0.0),
        ("-15", 0.0),
        ("7-15", 1.0),
        ("1.15", 0.0),
        ("", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_the_last_number_counts(text, reward):
    assert arithmetic.score(text, arithmetic.Question((7, 8), 15)) == reward


def test_template_is_checked():
    task = arithmetic.addition(template="{a}+{b}=")
    assert task.problem is not None
    question = task.problem(0, "train")
    assert task.prompt(question) == f"{question.numbers[0]}+{question.numbers[1]}="
    with pytest.raises(ValueError, match="may use the fields"):
        arithmetic.addition(template="{x}")
    with pytest.raises(ValueError, match="names none of its fields"):
        arithmetic.addition(template="hello")


def test_requests_that_outlive_their_server_are_cancelled_without_a_traceback(caplog: pytest.LogCaptureFixture):
    """Ctrl-C on a loaded machine printed a traceback of uvicorn for each request that was still running."""
    began = asyncio.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            began.set()
            await asyncio.sleep(60)

    async def main():
        server = await serve(app)
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            asked = asyncio.create_task(client.get(server.url))
            await began.wait()
            await server.aclose()
            with suppress(httpx.HTTPError):
                await asked

    asyncio.run(asyncio.wait_for(main(), 30))
    assert began.is_set()
    assert [record for record in caplog.records if record.exc_info] == []
