"""What the README shows works: its task file plays over HTTP, its configs load, its files, commands and flags exist."""

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fastapi import FastAPI

from gspo_jax.config import load_config, parse_config, require_task
from rollout.client import build_request, connect_task_app, preflight
from rollout.replies import parse_reply
from rollout.server import serve
from rollout.task import Task
from rollout.task_app import build_app
from rollout.task_file import load_task_file
from rollout.types import Problem, SamplingParams

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; fences are read in pairs, so that an end is never taken for a plain start."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


TASK_FILE = next(code for code in blocks("python") if "\ntask = Task(" in code and "train(" not in code)
SCRIPT = next(code for code in blocks("python") if "train(config" in code)
LAST_COMMANDS = re.findall(r"^\| `python -m ([\w.]+)[^`]*` \| (.*) \|$", README, re.MULTILINE)


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "reverse.py"
    path.write_text(TASK_FILE)
    return path


def policy_app(answer: str) -> FastAPI:
    """An OpenAI chat endpoint that always says `answer`."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat() -> dict:
        return {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]}

    return app


async def played(task: Task, problem: Problem, answer: str) -> float | None:
    """The reward of one episode of `task`, over two real sockets."""
    async with (
        await serve(policy_app(answer)) as policy,
        await serve(build_app(task)) as server,
        connect_task_app(server.url, timeout_s=20.0) as app,
    ):
        assert (await preflight(app))["sizes"] == {"train": 1000, "test": 100}
        request = build_request(
            problem, "trace_1", policy.url, env_name="reverse", policy_name="p", model="m", max_turns=1,
            sampling=SamplingParams(12), env_config={}, policy_config={}, timeout_s=20.0, session_id="s",
        )  # fmt: skip
        return parse_reply(await app.rollout(request), "trace_1", 1).reward


@pytest.mark.parametrize("split", ["train", "test"])
def test_task_file_plays_over_http(task_file, split):
    task = load_task_file(task_file)
    assert isinstance(task, Task)
    problem = Problem(5, split)
    word = re.findall(r"the word (\w+) ", task.prompt(problem))[0]
    assert asyncio.run(played(task, problem, word[::-1])) == 1.0
    assert asyncio.run(played(task, problem, "")) == 0.0
    half = word[::-1][:2] + "zz"
    assert asyncio.run(played(task, problem, half)) == 0.5


def test_task_file_holds_problems_out(task_file):
    task = load_task_file(task_file)
    assert isinstance(task, Task)
    assert task.prompt(Problem(5, "train")) != task.prompt(Problem(5, "test"))
    assert task.prompt(Problem(5, "train")) == task.prompt(Problem(5, "train"))


def test_task_file_is_short():
    assert len([line for line in TASK_FILE.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("text", blocks("toml"), ids=range(len(blocks("toml"))))
def test_toml_loads_without_a_warning(text, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(text)
    config, notes = load_config(path)
    assert notes == []
    assert require_task(config)


def test_script_is_the_api(monkeypatch):
    """The script runs with `train` replaced by one that only looks at what it is given: training needs the model."""
    given = []

    def train(config, *, task):
        given.append((config, task))
        return iter(())

    import gspo_jax.train

    monkeypatch.setattr(gspo_jax.train, "train", train)
    scope: dict = {}
    exec(compile(SCRIPT, "README.md", "exec"), scope)
    ((config, task),) = given
    assert scope["notes"] == []
    assert config == parse_config(config.model_dump(exclude_unset=True))[0]
    assert task.reward("It is 7.", Problem(17)) == 1.0
    assert task.reward("It is 8.", Problem(17)) == 0.0


def test_script_unpacks_what_it_names():
    import inspect

    import gspo_jax.train

    assert {"config", "task"} <= set(inspect.signature(gspo_jax.train.train).parameters)
    assert {"step", "metrics", "evaluation", "groups"} <= set(gspo_jax.train.Step.__dataclass_fields__)


def test_links_lead_to_files():
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)", README) if not t.startswith("http")]
    assert len(targets) > 5
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)$", "\n".join(blocks("bash")), re.MULTILINE)
    assert "quickstart" in targets
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize(("module", "text"), LAST_COMMANDS, ids=[module for module, _ in LAST_COMMANDS])
def test_commands_know_their_flags(module, text):
    """`--help` names exactly the flags that the table names."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    has = set(re.findall(r"^\s+(--[a-z-]+)", done.stdout, re.MULTILINE))
    assert set(re.findall(r"`(--[a-z-]+)", text)) == has


def test_every_command_is_in_the_table():
    commands = {
        f"gspo_jax.{path.stem}"
        for path in (ROOT / "gspo_jax").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text() and path.stem != "config"
    } | {f"gspo_jax.{path.parent.name}" for path in (ROOT / "gspo_jax").glob("*/__main__.py")}
    assert {module for module, _ in LAST_COMMANDS} == commands | {"rollout.task_app"}


def test_run_directory_names_what_runs_write():
    picture = next(block for block in blocks("") if block.startswith("runs/NAME/"))
    sources = "".join(path.read_text() for path in (ROOT / "gspo_jax").glob("*.py"))
    names = re.findall(r"^  ([\w.]+)", picture, re.MULTILINE)
    assert {"config.json", "metrics.jsonl", "digests.jsonl", "checkpoints", "export"} <= set(names)
    assert [name for name in names if f'"{name}"' not in sources] == []


def test_promised_limits_are_in_the_schema():
    """What the README calls missing is refused, not ignored."""
    quick = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
    for override in ("algorithm.method=ppo",):
        with pytest.raises(ValueError, match=override.split("=")[0]):
            parse_config(quick, [override])
