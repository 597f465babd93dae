"""score, export, evaluate, serve, --dry-run: each as typed, on a finished run and on a model folder."""

import json
import pickle
import re
import shutil
import signal
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_train import Commands, Finished, child, config_file, events

from gspo_jax import checkpoint, evaluate_command, export, score
from gspo_jax.models.layers import Spots
from gspo_jax.policy import load_policy
from gspo_jax.scoring import score_tokens

pytest_plugins = ("helpers_train",)


def tokens(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "tokens.npz", **arrays)  # pyright: ignore
    return folder / "tokens.npz"


# score


def test_score_gives_the_log_probability_of_every_next_token(model: Path, tmp_path: Path, command: Commands):
    ids = np.random.default_rng(0).integers(4, 300, (11, 9))  # more rows than are scored at a time
    done = command(score.main, model, "--input", tokens(tmp_path, input_ids=ids), "--output", tmp_path / "scores.npz")
    assert (done.code, done.errors) == (0, [])
    found = np.load(tmp_path / "scores.npz")["next_logprobs"]
    assert (found.shape, found.dtype) == ((11, 8), np.float32)
    policy, params = load_policy(model)
    spots = Spots(jnp.broadcast_to(jnp.arange(9), ids.shape), jnp.ones_like(ids))
    hidden = policy.model.apply({"params": params}, jnp.asarray(ids), spots).hidden
    plain = jax.nn.log_softmax(hidden.astype(jnp.float32) @ policy.head(params).T)
    expected = np.take_along_axis(np.asarray(plain)[:, :-1], ids[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_score_of_a_run_scores_its_best_checkpoint(finished: Finished, model: Path, tmp_path: Path, command: Commands):
    ids = np.random.default_rng(1).integers(4, 300, (2, 6))
    file = tokens(tmp_path, input_ids=ids)
    done = command(score.main, finished.run_dir, "--input", file, "--output", tmp_path / "run.npz", "--temperature", 2.0)
    assert (done.code, done.errors) == (0, [])
    step = checkpoint.best(finished.run_dir / "checkpoints")
    assert f"checkpoint {step} of {finished.run_dir}" in done.err
    policy, params = load_policy(model)
    params = checkpoint.restore_params(finished.run_dir / "checkpoints", step or 0, params)
    expected = score_tokens(policy, params, ids, temperature=2.0)
    np.testing.assert_array_equal(np.load(tmp_path / "run.npz")["next_logprobs"], expected)


def plain_file(path: Path) -> None:
    path.write_bytes(b"no archive")


def objects(path: Path) -> None:
    np.savez(path, input_ids=np.array([[1, 2], None], dtype=object))


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"input_ids": [[1, 2]]}))


def other_name(path: Path) -> None:
    np.savez(path, ids=np.ones((1, 2), np.int32))


def floats(path: Path) -> None:
    np.savez(path, input_ids=np.ones((1, 2)))


def one_row(path: Path) -> None:
    np.savez(path, input_ids=np.ones(5, np.int32))


def one_token(path: Path) -> None:
    np.savez(path, input_ids=np.ones((2, 1), np.int32))


def unknown_ids(path: Path) -> None:
    np.savez(path, input_ids=np.array([[1, 100000]]))


def cut_short(path: Path) -> None:
    np.savez(path, input_ids=np.ones((4, 50), np.int32))
    path.write_bytes(path.read_bytes()[:-60])


def bare_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones((2, 2), np.int32))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "write",
    [plain_file, objects, pickled, other_name, floats, one_row, one_token, unknown_ids, cut_short, bare_array, empty],
)
def test_score_refuses_what_are_no_tokens(model: Path, tmp_path: Path, command: Commands, write):
    file, out = tmp_path / "tokens.npz", tmp_path / "scores.npz"
    write(file)
    done = command(score.main, model, "--input", file, "--output", out)
    assert done.code == 2
    (error,) = done.errors
    assert str(file) in error
    assert "input_ids" in error
    assert not out.exists()


def test_score_refuses_a_temperature_of_zero(model: Path, tmp_path: Path, command: Commands):
    file = tokens(tmp_path, input_ids=np.ones((1, 2), np.int32))
    done = command(score.main, model, "--input", file, "--output", tmp_path / "out.npz", "--temperature", "0")
    assert done.code == 2
    assert "--temperature 0.0" in done.errors[0]


# export


def test_export_writes_the_best_checkpoint_or_the_latest(finished: Finished, model: Path, tmp_path: Path, command: Commands):
    _, like = load_policy(model)
    directory = finished.run_dir / "checkpoints"
    for flags, step in (((), checkpoint.best(directory)), (("--latest",), checkpoint.latest(directory))):
        out = tmp_path / f"out{len(flags)}"
        done = command(export.main, finished.run_dir, out, "--dtype", "float32", *flags)
        assert (done.code, done.errors) == (0, [])
        assert done.out.strip() == str(out)
        expected = checkpoint.restore_params(directory, step or 0, like)
        _, found = load_policy(out)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))
    again = command(export.main, finished.run_dir, tmp_path / "out0")
    assert again.code == 2
    assert str(tmp_path / "out0") in again.errors[0]


def test_export_of_what_is_no_run(model: Path, tmp_path: Path, command: Commands):
    for place in (model, tmp_path / "none"):
        done = command(export.main, place, tmp_path / "out")
        assert done.code == 2
        (error,) = done.errors
        assert str(place) in error
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_whole_checkpoint(finished: Finished, tmp_path: Path, command: Commands):
    run_dir = shutil.copytree(finished.run_dir, tmp_path / "run")
    for step in (run_dir / "checkpoints").iterdir():
        shutil.rmtree(step / "state")
    done = command(export.main, run_dir, tmp_path / "out")
    assert done.code == 2
    (error,) = done.errors
    assert "no complete checkpoint" in error


# evaluate


def test_evaluate_prints_what_training_logged_for_the_same_weights(finished: Finished, command: Commands, model: Path):
    logged = {e["step"]: e for e in events(finished.run_dir, "evaluation")}
    best = checkpoint.best(finished.run_dir / "checkpoints")
    for name, step in ((finished.run_dir, best), (model, 0)):
        done = command(evaluate_command.main, name, finished.config)
        assert (done.code, done.errors) == (0, [])
        found = json.loads(done.out)
        assert found == {
            "reward_mean": logged[step]["reward_mean"], "reward_sem": logged[step]["reward_sem"], "problems": 2, "samples": 1
        }  # fmt: skip


def test_evaluate_without_held_out_problems(finished: Finished, command: Commands, model: Path):
    done = command(evaluate_command.main, model, finished.config, "--set", "evaluation.instances=0")
    assert done.code == 2
    assert "evaluation.instances" in done.err


# serve


@pytest.mark.timeout(400)
def test_serve_answers_an_openai_client_until_ctrl_c(finished: Finished, compiled: Path, tmp_path: Path):
    export_folder = finished.run_dir / "export"
    argv = (export_folder, "--port", 0, "--context-length", 64, "--name", "tiny")
    with child("gspo_jax.serve", *argv, compiled=compiled, folder=tmp_path) as running:
        url = running.wait_for(lambda: re.search(r"http://\S+(?=/v1/chat/completions)", running.out.read_text()))[0]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
            body = {"model": "tiny", "messages": [{"role": "user", "content": "say"}], "max_tokens": 5}
            reply = http.post("/v1/chat/completions", json=body)
            wrong = http.post("/v1/chat/completions", json={"model": "tiny"})
        ended = running.stop(signal.SIGINT)
    assert reply.status_code == 200
    found = reply.json()
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["choices"][0]["finish_reason"] in ("stop", "length")
    assert 1 <= found["usage"]["completion_tokens"] <= 5
    assert wrong.status_code == 400
    assert "messages" in wrong.json()["error"]["message"]
    assert ended.code == 130
    assert "Traceback" not in ended.err


# train --dry-run


def test_a_dry_run_checks_everything_and_writes_nothing(model: Path, tmp_path: Path, command: Commands):
    done = command.train(config_file(tmp_path, model), "--dry-run")
    assert (done.code, done.errors) == (0, [])
    assert str(model) in done.out
    assert "llama" in done.out
    assert "'train': 6, 'test': 4" in done.out
    assert "4 steps of 2 groups x 4, 2 minibatches of 4" in done.out
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_finds_what_a_run_would(model: Path, tmp_path: Path, command: Commands):
    file = config_file(tmp_path, model, "http://127.0.0.1:9")
    done = command.train(file, "--dry-run")
    assert done.code == 1
    assert "http://127.0.0.1:9" in done.errors[0]
    done = command.train(file, "--dry-run", "--set", "services.task_app=arithmetic", "--set", "rollout.env_name=addition")
    assert done.code == 0


def test_a_dry_run_tells_where_the_run_would_be(finished: Finished, model: Path, tmp_path: Path, command: Commands):
    assert "(holds a run)" in command.train(finished.config, "--dry-run").out
    done = command.train(config_file(tmp_path, model), "--dry-run", "--run-dir", tmp_path / "elsewhere")
    assert str(tmp_path / "elsewhere") in done.out
