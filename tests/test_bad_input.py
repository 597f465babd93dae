"""Whatever is wrong, one message says what, why and what to change; the exit code is not 0 and nothing is left behind."""

import asyncio
import json
import math
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import Response
from fastapi.responses import JSONResponse
from helpers_train import Commands, Ran, ask, config_file, events, fake_app, served
from safetensors.numpy import load_file, save_file

from rollout.task import Task
from rollout.task_app import build_app

pytest_plugins = ("helpers_train",)

QUICK = ("--set", "training.iterations_per_epoch=1", "--set", "evaluation.instances=0")
CANARY = "canary-5f1c-do-not-print"


def refused(done: Ran, code: int, *words: object) -> None:
    """One error, all of `words` in it."""
    assert done.code == code
    assert len(done.errors) == 1, done.err
    message = done.err[done.err.index("error: ") :]
    for word in words:
        assert str(word) in message
    assert "Warning" not in done.err


# The config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.group_size=1", ("training.group_size", "1", "2")),
        ("training.learning_rate=-1e-5", ("training.learning_rate", "-1e-05", "greater than 0")),
        ("training.batch_size=3", ("training.batch_size", "8 episodes", "minibatches of 3", "use batch_size = 2 or 4")),
        ("training.group_size=3", ("training.group_size", "8 episodes", "groups of 3", "use episodes_per_batch = 6 or 9")),
        ("policy.max_tokens=64", ("policy.max_tokens", "64", "serving.context_length")),
        ("training.learning_rat=1", ("training.learning_rat", "learning_rate")),
        ("model.trainer_mode=half", ("model.trainer_mode", "half", "full")),
        ("serving.urls=['http://127.0.0.1:1']", ("serving.urls", "serving.engine", "vllm")),
        (
            "serving={engine='vllm', launch={python='nowhere/python'}}",
            ("serving.launch", "nowhere/python", "make install-vllm"),
        ),
        ("serving={engine='vllm', launch={extra_args=['--port=1']}}", ("serving.launch.extra_args", "--port")),
        ("serving.context_length=4096", ("serving.context_length", "4096", "256 positions")),
        ("mesh.fsdp=99", ("mesh.fsdp", "99 devices")),
        ("services.task_app=nowhere", ("services.task_app", "nowhere", "arithmetic")),
        ("services.task_app=nowhere.py", ("nowhere.py",)),
        ("services.task_url='http://localhost:99999'", ("services.task_url", "99999")),
    ],
)
def test_cfg_07_a_config_that_cannot_run(model: Path, tmp_path: Path, command: Commands, override: str, words: tuple):
    """A batch that does not divide hung at the first update; a group of one has no baseline."""
    done = command.train(config_file(tmp_path, model), *QUICK, "--set", override)
    refused(done, 2, *words)


def test_a_config_that_is_not_there_or_not_toml(tmp_path: Path, command: Commands):
    refused(command.train(tmp_path / "none.toml"), 2, "none.toml", "no such file")
    (tmp_path / "bad.toml").write_text("[model\n")
    refused(command.train(tmp_path / "bad.toml"), 2, "bad.toml", "not valid TOML", "line 1")


def test_a_run_directory_that_cannot_be_one(model: Path, tmp_path: Path, command: Commands):
    (tmp_path / "file").write_text("")
    file = config_file(tmp_path, model)
    refused(command.train(file, "--run-dir", tmp_path / "file"), 2, tmp_path / "file", "--run-dir")
    refused(command.train(file, "--run-dir", tmp_path / "file" / "run"), 2, tmp_path / "file" / "run", "--run-dir")


def test_resuming_into_a_folder_that_is_no_run(model: Path, tmp_path: Path, command: Commands):
    done = command.train(config_file(tmp_path, model), "--run-dir", model, "--resume")
    refused(done, 2, model / "config.json", "run directory")


# The model


@pytest.mark.parametrize("name", ["/no/such/folder", "no such id", "unheard-of/model"])
def test_an_unknown_model(model: Path, tmp_path: Path, command: Commands, name: str):
    done = command.train(config_file(tmp_path, model), *QUICK, "--set", f"model.base='{name}'")
    refused(done, 2, "model.base", name)


def changed_model(model: Path, out: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    out.mkdir()
    for file in model.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


FIRST = "model.layers.0.self_attn.q_proj.weight"


def missing(tensors: dict[str, np.ndarray]) -> None:
    del tensors[FIRST]


def unused(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)


def misshapen(tensors: dict[str, np.ndarray]) -> None:
    tensors[FIRST] = np.zeros((32, 31), np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (missing, (FIRST, "missing")),
        (unused, ("model.layers.0.self_attn.q_proj.bias",)),
        (misshapen, (FIRST, "31", "32")),
    ],
)
def test_a_model_that_does_not_fit(model: Path, tmp_path: Path, command: Commands, change: Callable, words: tuple):
    folder = changed_model(model, tmp_path / "model", change)
    done = command.train(config_file(tmp_path, model), *QUICK, "--set", f"model.base={folder}")
    refused(done, 2, folder, *words)


def test_a_damaged_model_file(model: Path, tmp_path: Path, command: Commands):
    folder = changed_model(model, tmp_path / "model", lambda tensors: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(command.train(config_file(tmp_path, model), *QUICK, "--set", f"model.base={folder}"), 2, folder, file.name)
    file.write_bytes(b"not a tensor file")
    refused(command.train(config_file(tmp_path, model), *QUICK, "--set", f"model.base={folder}"), 2, folder, file.name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_model_without_one_of_its_files(model: Path, tmp_path: Path, command: Commands, name: str):
    folder = changed_model(model, tmp_path / "model", lambda tensors: None)
    (folder / name).unlink()
    refused(command.train(config_file(tmp_path, model), *QUICK, "--set", f"model.base={folder}"), 2, folder)


# The task app, before the run


def never(_: Mapping[str, Any]) -> Any:
    raise AssertionError("no rollout may be asked for")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_task_app_that_is_down(model: Path, tmp_path: Path, command: Commands):
    url = f"http://127.0.0.1:{closed_port()}"
    refused(command.train(config_file(tmp_path, model, url), *QUICK), 1, url, "GET /health", "Is it running?")


def test_a_task_app_that_wants_another_key(model: Path, tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", CANARY)
    with served(build_app(Task(lambda p: "say", lambda t, p: 0.0), ("the right key",))) as url:
        done = command.train(config_file(tmp_path, model, url), *QUICK)
    refused(done, 1, url, "400", "unauthorised", "ENVIRONMENT_API_KEY")
    assert CANARY not in done.out + done.err


def test_a_key_that_no_header_can_carry(model: Path, tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", CANARY + "\n")
    done = command.train(config_file(tmp_path, model), *QUICK)
    refused(done, 2, "X-API-Key", "printable ASCII", "services")
    assert CANARY not in done.out + done.err


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"health": {"healthy": False}}, ("healthy=false",)),
        ({"health": Response("<html>", media_type="text/html")}, ("text/html", "expected JSON")),
        ({"info": {"tasks": []}}, ("taskset",)),
        ({"info": Response("gone", status_code=404)}, ("404", "rollout.env_name")),
        ({"info": Response("oops", status_code=500)}, ("500",)),
    ],
)
def test_a_url_that_is_no_task_app(model: Path, tmp_path: Path, command: Commands, answers: dict, words: tuple):
    with served(fake_app(never, **answers)) as url:
        refused(command.train(config_file(tmp_path, model, url), *QUICK), 1, url, *words)


def test_a_task_app_without_this_environment(model: Path, tmp_path: Path, command: Commands):
    with served(
        build_app({"one": Task(lambda p: "say", lambda t, p: 0.0), "two": Task(lambda p: "", lambda t, p: 0.0)})
    ) as url:
        done = command.train(config_file(tmp_path, model, url), *QUICK, "--set", "rollout.env_name=three")
    refused(done, 1, "three")


# The task app, during the run


def reply(value: Any) -> Response:
    """A reward as the task app would send it: JSON that may hold NaN."""
    return Response(json.dumps({"metrics": {"outcome_reward": value}}), media_type="application/json")


async def slow(_: Mapping[str, Any]) -> Any:
    await asyncio.sleep(30)


FAULTS = {
    "timeout": slow,
    "unauthorised": lambda _: JSONResponse({"detail": {"error": {"code": "unauthorised", "message": "bad key"}}}, 400),
    "not_found": lambda _: Response("no", status_code=404),
    "invalid_request": lambda _: JSONResponse({"detail": [{"loc": ["body", "env"], "msg": "Field required"}]}, 422),
    "server_error": lambda _: JSONResponse({"detail": "it broke at [/tag] and [b]"}, 500),
    "not_json": lambda _: Response("<html>", media_type="text/html"),
    "not_an_object": lambda _: [1.0],
    "no_reward": lambda _: {"metrics": {}},
    "null": lambda _: reply(None),
    "nan_reward": lambda _: reply(math.nan),
    "infinite": lambda _: reply(-math.inf),
    "boolean": lambda _: reply(True),
    "text": lambda _: reply("1.0"),
    "aborted": lambda _: {"aborted": True, "metrics": {"outcome_reward": 1.0}},
    "correlation_mismatch": lambda _: {"trace_correlation_id": "trace_other", "metrics": {"outcome_reward": 1.0}},
    "no_model_calls": lambda _: {"metrics": {"outcome_reward": 1.0}},
}
REASONS = {"null": "no_reward", "infinite": "nan_reward", "boolean": "invalid_reward", "text": "invalid_reward"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_task_app_that_fails_every_time(model: Path, tmp_path: Path, command: Commands, fault: str):
    """TOK-19 among them: a reply without a single recorded token is nothing to train on."""
    deadline = 0.7 if fault == "timeout" else 60.0  # a busy machine may take seconds over any other reply
    with served(fake_app(FAULTS[fault])) as url:
        done = command.train(config_file(tmp_path, model, url), *QUICK, "--set", f"rollout.timeout_s={deadline}")
    reason = REASONS.get(fault, fault)
    refused(done, 1, "8 of 8 rollouts failed", "rollout.max_void = 0.5", f"8  {reason}")
    run_dir = tmp_path / "runs" / "tiny"
    found = events(run_dir, "rollout.void")
    assert [e["reason"] for e in found] == [reason] * 8
    assert all(e["message"] for e in found)
    assert done.out.count(f"void rollout ({reason})") == 8
    assert not (run_dir / "metrics.jsonl").exists()
    assert not list((run_dir / "checkpoints").glob("[0-9]*"))


def test_cli_01_more_than_half_is_too_much_and_the_table_counts_reasons(model: Path, tmp_path: Path, command: Commands):
    calls = iter(range(100))

    async def answer(request: Mapping[str, Any]) -> Any:
        number = next(calls)
        await ask(request)
        return {"metrics": {}} if number < 3 else reply(math.nan) if number < 5 else reply(1.0)

    with served(fake_app(answer)) as url:
        done = command.train(config_file(tmp_path, model, url), *QUICK)
    refused(done, 1, "5 of 8 rollouts failed")
    table = done.err[done.err.index("error: ") :].splitlines()[1:]
    assert [row.split() for row in table] == [["3", "no_reward"], ["2", "nan_reward"]]


def test_a_failed_attempt_is_tried_again_and_then_counts(model: Path, tmp_path: Path, command: Commands):
    failed: set[str] = set()
    seeds: dict[int, int] = {}

    async def answer(request: Mapping[str, Any]) -> Any:
        seed = request["env"]["seed"]
        seeds[seed] = seeds.get(seed, 0) + 1
        if seeds[seed] == 1:
            failed.add(request["run_id"])
            return Response("busy", status_code=503)
        await ask(request)
        return reply(float(seeds[seed]))

    with served(fake_app(answer)) as url:
        done = command.train(config_file(tmp_path, model, url), *QUICK, "--set", "rollout.max_attempts=2")
    assert (done.code, done.errors) == (0, [])
    retries = events(tmp_path / "runs" / "tiny", "rollout.retry")
    assert {e["trace_id"] for e in retries} == failed
    assert len(failed) == 2
    assert events(tmp_path / "runs" / "tiny", "rollout.void") == []


def test_prompts_longer_than_the_context(model: Path, tmp_path: Path, command: Commands):
    file = config_file(tmp_path, model)
    (tmp_path / "task.py").write_text(
        "from rollout.task_app import Task\ntask = Task(lambda p: 'a long story ' * 40, lambda text, p: 1.0)\n"
    )
    done = command.train(file, *QUICK)
    refused(done, 1, "8 of 8 rollouts failed")
    (found, *_) = events(tmp_path / "runs" / "tiny", "rollout.void")
    assert "serving.context_length = 64" in found["message"]


def test_a_batch_of_failures_that_is_allowed_changes_nothing(model: Path, tmp_path: Path, command: Commands):
    """With rollout.max_void = 1 a step may be empty: it is counted and the weights stay."""
    with served(fake_app(FAULTS["no_reward"])) as url:
        done = command.train(config_file(tmp_path, model, url), *QUICK, "--set", "rollout.max_void=1.0")
    assert (done.code, done.errors) == (0, [])
    (record,) = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert record["rollout/void_fraction"] == 1.0
    assert record["reward/mean"] is None
    assert record["tokens/trained"] == 0
    assert all(math.isfinite(value) for value in record.values() if value is not None)


def test_an_evaluation_of_which_nothing_succeeds(model: Path, tmp_path: Path, command: Commands):
    with served(fake_app(FAULTS["no_reward"])) as url:
        done = command.train(config_file(tmp_path, model, url))
    refused(done, 1, "evaluation", "2 rollouts failed", "no_reward")


def test_a_task_file_that_breaks(model: Path, tmp_path: Path, command: Commands):
    file = config_file(tmp_path, model)
    (tmp_path / "task.py").write_text("import no_such_module\n")
    refused(command.train(file, *QUICK), 2, tmp_path / "task.py", "no_such_module")
    (tmp_path / "task.py").write_text("tsk = 1\n")
    refused(command.train(file, *QUICK), 2, tmp_path / "task.py", "task")


# Secrets


def test_sec_02_no_secret_is_written_or_printed(
    model: Path, tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
):
    """The API key appeared in the tracker's run config."""
    header = "canary-header-77aa"
    monkeypatch.setenv("ENVIRONMENT_API_KEY", CANARY)
    seen: set[str] = set()

    async def answer(request: Mapping[str, Any]) -> Any:
        seen.add(request["run_id"])
        if len(seen) == 1:
            return JSONResponse({"detail": f"key {CANARY} and {header} were sent"}, 500)
        await ask(request)
        return reply(float(len(seen)))

    with served(fake_app(answer)) as url:
        words = [str(config_file(tmp_path, model, url)), *QUICK, "--set", f"services.headers.X-Extra={header}"]
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        done = command.train(*words)
    assert (done.code, done.errors) == (0, [])
    assert "void rollout" in done.out
    for canary in (CANARY, header):
        assert canary not in done.out + done.err
        for file in (tmp_path / "runs").rglob("*"):
            assert not file.is_file() or canary.encode() not in file.read_bytes(), file
    recorded = json.loads((tmp_path / "runs" / "tiny" / "config.json").read_text())
    assert recorded["config"]["services"]["headers"] == {"X-Extra": "***"}
    assert "--set" in recorded["command"]
