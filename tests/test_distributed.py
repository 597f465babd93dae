"""One run over several processes: the bits of one process, and one end for all with a named cause."""

import json
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers_distributed import LOST_AFTER, several, training
from helpers_train import config_file, lines

from gspo_jax.distributed import Place, find_place
from gspo_jax.team import GRACE_SECONDS, TeamError

pytest_plugins = ("helpers_train",)

STEPS = 3
BOUND = LOST_AFTER + GRACE_SECONDS + 15.0
"""Seconds in which all must have ended; fifteen of them for a busy machine."""
SETTINGS = [
    word
    for override in ("mesh.fsdp=8", f"training.iterations_per_epoch={STEPS}", "evaluation.every_n_iters=0",
                     "evaluation.instances=0", "run.checkpoint_every=1")
    for word in ("--set", override)
]  # fmt: skip
FAILING = """
import os
from rollout.task_app import Task

async def reward(text, problem):
    if problem.seed in map(int, os.environ["FAILING"].split()):
        raise ValueError("broken")
    return 10.0 + sum(letter in "aeiou" for letter in text)

task = Task(lambda problem: f"say {problem.seed}", reward, splits={"train": 6, "test": 4})
"""


def digests(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "digests.jsonl"
    return lines(file) if file.exists() else []


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics that are no matter of time."""
    records = lines(run_dir / "metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens/per_second"} for r in records]


@pytest.fixture(scope="module")
def alone(model: Path, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one process with eight devices, and with the collectives of several."""
    folder = tmp_path_factory.mktemp("alone")
    with training(1, folder, compiled, config_file(folder, model), *SETTINGS) as running:
        assert running.codes() == [0], running.err(0)[-2000:]
    return folder / "runs" / "tiny"


@pytest.mark.timeout(300)
def test_two_processes_have_the_bits_of_one(alone: Path, model: Path, compiled: Path, tmp_path: Path):
    """Two times four devices against eight: parameters, batches and metrics of every step, and the exported model."""
    with training(2, tmp_path, compiled, config_file(tmp_path, model), *SETTINGS) as running:
        assert running.codes() == [0, 0], [running.err(n)[-2000:] for n in range(2)]
        assert "process 1 of 2: step 3 learned" in running.err(1)
        assert "process" not in running.err(0)
    run_dir = tmp_path / "runs" / "tiny"
    assert [record["step"] for record in digests(run_dir)] == list(range(STEPS))
    assert digests(run_dir) == digests(alone)
    assert untimed(run_dir) == untimed(alone)
    weights = Path("export") / "model.safetensors"
    assert (run_dir / weights).read_bytes() == (alone / weights).read_bytes()
    assert json.loads((run_dir / "config.json").read_text())["processes"] == 2


@pytest.mark.timeout(300)
def test_a_killed_process_ends_all_and_the_run_goes_on(alone: Path, model: Path, compiled: Path, tmp_path: Path):
    """SIGKILL while process 0 waits for rollouts or in a collective: named in time; resumed, the run is the unbroken one."""
    file, run_dir = config_file(tmp_path, model), tmp_path / "runs" / "tiny"
    with training(2, tmp_path, compiled, file, *SETTINGS, TASK_DELAY="0.5") as running:
        running.wait_for(lambda: (run_dir / "checkpoints" / "1").exists())
        running.processes[1].kill()
        began = time.monotonic()
        assert running.codes(BOUND) == [1, -signal.SIGKILL]
        assert time.monotonic() - began > LOST_AFTER / 2
        (told,) = running.errors(0)
        assert f"process 1 of 2 is gone: not heard of for {LOST_AFTER:g} s" in told
    assert len(digests(run_dir)) < STEPS
    with training(2, tmp_path, compiled, file, *SETTINGS, "--resume") as running:
        assert running.codes() == [0, 0], [running.err(n)[-2000:] for n in range(2)]
        assert not re.search("goes on with step 0", running.err(1))
    assert digests(run_dir) == digests(alone)


@pytest.mark.timeout(300)
def test_process_0_is_killed_and_the_other_does_not_wait(model: Path, compiled: Path, tmp_path: Path):
    file = config_file(tmp_path, model)
    with training(2, tmp_path, compiled, file, *SETTINGS, TASK_DELAY="2") as running:
        running.wait_for(lambda: "goes on with step 0" in running.err(1))
        running.processes[0].kill()
        assert running.processes[1].wait(BOUND) != 0
        assert re.search("leader task was|process 0 of 2, where the coordinator is, is gone", running.err(1))


@pytest.mark.timeout(300)
def test_what_stops_process_0_stops_all_with_the_same_sentence(model: Path, compiled: Path, tmp_path: Path):
    """All rollouts of the first step fail."""
    file = config_file(tmp_path, model)
    (tmp_path / "task.py").write_text(FAILING)
    with training(2, tmp_path, compiled, file, *SETTINGS, FAILING="0 1 2 3 4 5") as running:
        assert running.codes() == [1, 1]
        (told,), (heard,) = running.errors(0), running.errors(1)
    assert told == "error: 8 of 8 rollouts failed, more than rollout.max_void = 0.5:"
    assert heard == told.replace("error: ", "error: process 0 of 2: ")


@pytest.mark.timeout(300)
def test_ctrl_c_on_one_ends_all(model: Path, compiled: Path, tmp_path: Path):
    file = config_file(tmp_path, model)
    with training(2, tmp_path, compiled, file, *SETTINGS, TASK_DELAY="2") as running:
        running.wait_for(lambda: "goes on with step 0" in running.err(1))
        running.processes[1].send_signal(signal.SIGINT)
        assert running.codes(BOUND) == [1, 130]
        (told,) = running.errors(0)
    assert told.startswith("error: process 1 of 2: was interrupted")


@pytest.mark.timeout(120)
def test_another_config_is_refused(model: Path, compiled: Path, tmp_path: Path):
    file = config_file(tmp_path, model)
    different = ("--set", "training.learning_rate=0.5")
    with training(2, tmp_path, compiled, file, *SETTINGS, only=different) as running:
        assert running.codes(60) == [1, 1]
        expected = "error: process 1 is not as process 0: training.learning_rate: 0.01 on process 0, 0.5"
        assert [running.errors(n) for n in range(2)] == [[expected]] * 2
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


MEETING = """
import sys, time
from gspo_jax.distributed import Place, join
from gspo_jax.team import TeamError
number, coordinator = int(sys.argv[1]), sys.argv[2]
team = join(Place(coordinator, 2, number), lost_after=30)
try:
    with team:
        assert team.meet("first", "abc"[number]) == ["a", "b"]
        text = "\\u00e4" * 5000
        if number == 0:
            team.lead("work", text, many=3)
        else:
            assert team.next() == ("work", text, {"many": 3})
            time.sleep(5)
        team.meet("second", seconds=2)
except TeamError as error:
    print(f"error: {error}", file=sys.stderr)
    team.leave(1)
"""


@pytest.mark.timeout(120)
def test_who_does_not_come_to_a_meeting_is_named(tmp_path: Path):
    """It lives, but sleeps: the silence of the dead would not find it. Before, what process 0 said arrived whole."""
    with several(2, tmp_path, lambda number, coordinator: ("-c", MEETING, number, coordinator)) as running:
        assert running.codes(60) == [1, 1]
        expected = "error: process 1 of 2 is not at 'second' within 2 s, while the others waited"
        assert running.errors(0) == [expected], running.err(0)
        assert running.errors(1) == [expected], running.err(1)


PUBLISHING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
import jax, numpy as np
from helpers_train import config_of
from gspo_jax.distributed import Place, join
from gspo_jax.engines import gather_published
from gspo_jax.mesh import mesh_of
from gspo_jax.outgoing import Outgoing
from gspo_jax.start import load_start
from gspo_jax.steps import on_host
team = join(Place(sys.argv[2], 2, int(sys.argv[1])))
config = config_of(Path(sys.argv[3]), "mesh.fsdp=4", "mesh.tensor=2", "serving.engine='vllm'")
start, plain = load_start(config, mesh_of(config)), load_start(config)
out = Outgoing(start.policy.table, start.policy.config.sizes(), "BF16", stochastic=True)
assert not start.params["embedding"].is_fully_addressable
split, whole = (dict(out.arrays(params, 3)) for params in (start.params, plain.params))
assert split.keys() == whole.keys()
for name in whole:
    np.testing.assert_array_equal(split[name].view(np.uint16), whole[name].view(np.uint16))
for mine in (start.layout.gathered(start.params), on_host(start.params)):
    jax.tree.map(np.testing.assert_array_equal, mine, plain.params)
assert {x.device for x in jax.tree.leaves(start.layout.gathered(start.params))} == {jax.local_devices()[0]}
gather_published(config, start)(0, start.params)
print("published")
team.leave(0)
"""


@pytest.mark.timeout(120)
def test_what_is_published_is_whole_in_every_process(model: Path, tmp_path: Path):
    """Gathered of eight devices in two processes: the bits of the model's folder, for sampler, export and servers."""
    tests = Path(__file__).parent
    with several(2, tmp_path, lambda n, coordinator: ("-c", PUBLISHING, n, coordinator, model, tests)) as running:
        assert running.codes(100) == [0, 0], [running.err(n)[-2000:] for n in range(2)]
        assert all("published" in (tmp_path / f"out{n}").read_text() for n in range(2))


# Where a process belongs

RAY = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.mark.parametrize(
    ("flags", "environment", "place"),
    [
        ((None, None, None), {}, None),
        ((None, None, None), {"SLURM_NTASKS": "4"}, None),
        ((None, None, None), RAY, Place("10.0.0.1:8476", 4, 2)),
        (("auto", None, None), {}, Place(None, None, None)),
        (("auto", None, None), RAY, Place("10.0.0.1:8476", 4, 2)),
        (("a:1", 2, 0), {}, Place("a:1", 2, 0)),
        (("a:1", 2, 0), RAY, Place("a:1", 2, 0)),
        (("a:1", None, None), {}, Place("a:1", None, None)),
        ((None, None, 0), RAY, Place("10.0.0.1:8476", 4, 0)),
    ],
)
def test_flags_come_before_the_environment(flags: tuple[Any, Any, Any], environment: Mapping[str, str], place: Place | None):
    assert find_place(*flags, environment) == place


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("a:1", 2, 2), {}, "--process 2 is not one of --processes 2"),
        (("a:1", 2, -1), {}, "--process -1 is not one of"),
        ((None, 2, 1), {}, "need --coordinator"),
        (("somewhere", 2, 1), {}, "'somewhere' is neither HOST:PORT nor auto"),
        ((None, None, None), RAY | {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID='two' is not a number"),
    ],
)
def test_a_place_that_cannot_be_is_refused(flags: tuple[Any, Any, Any], environment: Mapping[str, str], message: str):
    with pytest.raises(TeamError, match=re.escape(message)):
        find_place(*flags, environment)
