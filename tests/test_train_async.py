"""Sampling beside training (PipelineRL): tokens as old as allowed and no older, numbers kept apart, logs that replay."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import done, group, turn
from helpers_train import (
    GROUPS,
    MEMBERS,
    STEPS,
    Commands,
    Finished,
    ask,
    config_file,
    config_of,
    fake_app,
    lines,
    served,
)

from gspo_jax import replay
from gspo_jax.batch import Packing, pack
from gspo_jax.learner import learner
from gspo_jax.losses import gspo
from gspo_jax.train import train
from gspo_jax.watcher import Step, Watcher

pytest_plugins = ("helpers_train",)

EPISODES = GROUPS * MEMBERS


def versions(trajectory: Any) -> list[set[int]]:
    """The versions behind each turn."""
    return [set(turn.versions) for turn in trajectory.turns]


@dataclass
class Held(Watcher):
    """A task app that makes every token as old as it can be, and the watcher that tells it where the learner is.

    An episode of step n makes a call as soon as it may. It makes its last one when the learner waits for step n and all
    episodes of step n + k have made their first.
    """

    ahead: int
    waiting: int = -1
    """The step that the learner waits for."""
    began: Counter[int] = field(default_factory=Counter)
    told: list[int] = field(default_factory=list)
    """The step the learner was at, of each rollout it was told of."""

    def phase(self, name: str) -> None:
        self.waiting += name == "rollout"

    def rollout(self, trajectory: Any) -> None:
        self.told.append(self.waiting)

    async def play(self, request: Mapping[str, Any]) -> dict[str, float]:
        said = await ask(request)
        if request["env"]["config"]["split"] == "train":
            step = request["env"]["seed"] // GROUPS
            self.began[step] += 1
            last = min(step + self.ahead, STEPS - 1)
            while self.waiting < step or self.began[last] < EPISODES:
                await asyncio.sleep(0.002)
            await ask(request, "again")
        return {"reward": float(sum(letter in "aeiou" for letter in said))}


@dataclass(frozen=True)
class Run:
    ahead: int
    run_dir: Path
    steps: list[Step]
    watcher: Held


@pytest.fixture(scope="module", params=[1, 2])
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    watcher, run_dir = Held(request.param), tmp_path_factory.mktemp("held") / "run"
    with served(fake_app(watcher.play, info={"taskset": {}})) as url:
        config = config_of(
            model, f"rollout.max_staleness={watcher.ahead}", "rollout.max_concurrent_rollouts=32", "rollout.max_turns=2",
            f"services.task_url={url}", "guards.clip_fraction=off",
        )  # fmt: skip
        yield Run(watcher.ahead, run_dir, list(train(config, run_dir=run_dir, watcher=watcher)), watcher)


def test_a_trajectory_spans_versions_and_its_oldest_token_is_as_old_as_allowed(run: Run):
    """WSY-15: a single label would call the whole trajectory what its first token was; the oldest counts."""
    assert [step.step for step in run.steps] == list(range(STEPS))
    for step in run.steps:
        oldest = max(0, step.step - run.ahead)
        assert [versions(t) for g in step.groups for t in g.trajectories] == [[{oldest}, {step.step}]] * EPISODES
        assert step.metrics["rollout/staleness_max"] == step.metrics["staleness/max"] == step.step - oldest
        assert step.metrics["rollout/void_fraction"] == 0
    assert max(step.metrics["rollout/staleness_max"] or 0 for step in run.steps) == run.ahead


def test_the_ratio_is_1_in_the_first_minibatch_and_mismatch_holds_no_staleness(run: Run):
    """Tokens of older weights, and later ones drawn with their cache, differ by 0.1 nats here; two engines by 1e-6."""
    for step in run.steps:
        assert step.metrics["policy/ratio_mean_1"] == 1.0
        if step.step == 0:
            assert (step.metrics["mismatch/max"] or 1.0) < 1e-3
            assert step.metrics["staleness/logprob_abs"] is None
        else:
            assert step.metrics["mismatch/mean"] is None
            assert (step.metrics["staleness/logprob_abs"] or 0.0) > 1e-2


def test_an_evaluation_beside_rollouts_in_flight_is_of_one_version(run: Run):
    for evaluation in (0, 2, 4):
        rows = lines(run.run_dir / "rollouts" / f"eval_{evaluation:06d}.jsonl")
        assert {v for row in rows for turn in row["turns"] for v in turn["versions"]} == {evaluation}
    assert run.watcher.began.total() == STEPS * EPISODES


def test_a_watcher_hears_of_the_rollouts_of_a_step_when_it_is_the_current_one(run: Run):
    assert run.watcher.told == [step for step in range(STEPS) for _ in range(EPISODES)]


def test_what_was_consumed_replays_to_the_same_bits(run: Run, command: Commands):
    done = command(replay.main, run.run_dir)
    assert (done.code, done.errors) == (0, [])
    assert done.out.splitlines() == [f"step {n}: batch and params reproduced" for n in range(STEPS)]


def test_max_staleness_0_is_the_synchronous_run_bit_for_bit(finished: Finished, model: Path, tmp_path: Path, command: Commands):
    done = command.train(config_file(tmp_path, model), "--set", "rollout.max_staleness=0")
    assert done.code == 0
    run_dir = tmp_path / "runs" / "tiny"
    assert lines(run_dir / "digests.jsonl") == finished.digests()
    for one, other in zip(lines(run_dir / "metrics.jsonl"), lines(finished.run_dir / "metrics.jsonl"), strict=True):
        assert one["rollout/staleness_max"] == one["staleness/max"] == 0
        assert {k: v for k, v in one.items() if not k.startswith("time/") and k != "tokens/per_second"} == {
            k: v for k, v in other.items() if not k.startswith("time/") and k != "tokens/per_second"
        }


def test_staleness_is_reported_apart_from_mismatch():
    """Version 5 learns from trajectories of version 5, of 3, and of 4 then 5: only the first says how two engines differ."""
    drawn = {7: (5, 5, 5), 8: (3, 3, 3), 9: (4, 5, 5)}
    trajectories = []
    for member, (token, found) in enumerate(drawn.items()):
        completed = turn([1], [token] * 3, [-1.0 - 0.01 * member] * 3)
        trajectories.append(done(replace(completed, versions=found), member=member))
    batch = pack([group(*trajectories)], [[1.0, -0.5, -0.5]], 3, Packing(8, 1, "shared_prefix"))

    def logprobs(params, micro):
        return jnp.where(micro.loss_mask, params["x"], 0), jnp.where(micro.loss_mask, 1.0, 0)

    found = learner(logprobs, gspo, optax.sgd(1e-3))
    state = found.init({"x": jnp.float32(-1.0)})
    _, metrics = jax.jit(found.update)(state._replace(step=jnp.int32(5)), batch)
    assert float(metrics["mismatch/mean"]) == float(metrics["mismatch/max"]) == float(metrics["mismatch/sequence_mean"]) == 0
    np.testing.assert_allclose(float(metrics["staleness/logprob_abs"]), (3 * 0.01 + 3 * 0.02) / 6, rtol=1e-4)
    np.testing.assert_allclose(float(metrics["staleness/mean"]), (3 * 2 + 1) / 9, rtol=1e-6)
    assert float(metrics["staleness/max"]) == 2
