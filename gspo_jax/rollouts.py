"""The world the learner learns from, opened as one thing: engine, gateway and task app on loopback ports, and the client."""

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from fastapi import FastAPI

from gspo_jax.config import ConfigError, require_task
from gspo_jax.engines import Engine, open_engine
from gspo_jax.policy import Policy
from gspo_jax.sections import Config
from gspo_jax.start import Start
from gspo_jax.types import Params
from rollout.apps.arithmetic import TASKS
from rollout.client import TaskApp, connect_task_app, preflight
from rollout.runner import RolloutSettings, run_groups
from rollout.server import serve
from rollout.stream import Slots
from rollout.task import Env, Task
from rollout.task_app import build_app
from rollout.task_file import load_task_file
from rollout.types import Group, Problem, SamplingParams, Trajectory
from serving_bridge.chat import load_chat
from serving_bridge.gateway import Gateway, build_gateway_app

TRAINING, EVALUATION = 0, 1
"""First number of a request's key: the two never share randomness."""

type AnyTask = Task | Env | Mapping[str, Task | Env] | FastAPI
type OnDone = Callable[[int, Trajectory], None]


@dataclass(frozen=True)
class Rollouts:
    """Everything that turns problems into groups of trajectories."""

    engine: Engine
    gateway: Gateway
    app: TaskApp
    sizes: Mapping[str, int]
    """Problems per split, as the task app states them."""
    settings: RolloutSettings
    on_event: Callable[[dict[str, Any]], None]
    slots: Slots
    """Episodes in flight, of all calls of `collect` together; those of an evaluation first, then those of the oldest step."""

    async def publish(self, version: int, params: Params) -> dict[str, float]:
        """From now on the policy is `params`, what is trained, called `version`. Returns what the engine measured."""
        return await self.engine.publish(version, params)

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        *,
        step: int,
        branch: int = TRAINING,
        first: int = 0,
        on_done: OnDone | None = None,
    ) -> tuple[Group, ...]:
        """One group per problem, in order, numbered from `first`. Equal step, branch, number and weights give equal tokens."""
        sampling = replace(self.settings.sampling, key=(branch,))
        settings = replace(self.settings, sampling=sampling)
        return await run_groups(
            self.app,
            self.gateway,
            problems,
            group_size,
            settings,
            step=step,
            first=first,
            on_event=self.on_event,
            on_done=on_done,
            slots=self.slots.at(-1 if branch == EVALUATION else step),
        )


@asynccontextmanager
async def open_rollouts(
    config: Config,
    start: Start,
    *,
    task: AnyTask | None = None,
    run_dir: Path | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    gathered: Callable[[Params], Params] = lambda params: params,
) -> AsyncIterator[Rollouts]:
    """Engine, gateway, and the task app: `task` if given, else what `[services]` names. All ports are closed at the end.

    `run_dir` is where servers log; a temporary folder unless given. `gathered`: see `gspo_jax.sharding.Placement`.
    """
    context = _context_length(config, start.policy)
    chat = load_chat(start.policy.folder)
    async with AsyncExitStack() as stack:
        logs = run_dir or Path(stack.enter_context(TemporaryDirectory()))
        engine = await stack.enter_async_context(open_engine(config, start, chat, context, logs, on_event, gathered))
        gateway = Gateway(
            engine.sample, chat, model=config.model.label, context_length=context, timeout_s=config.rollout.timeout_s
        )
        server = await stack.enter_async_context(await serve(build_gateway_app(gateway), config.serving.host))
        gateway.base_url = server.url
        url = await _task_url(config, task, stack)
        app = await stack.enter_async_context(_connected(config, url))
        taskset = await preflight(app, config.rollout.env_name)
        slots = Slots(config.rollout.max_concurrent_rollouts)
        yield Rollouts(engine, gateway, app, _sizes(taskset), rollout_settings(config), on_event, slots)


@asynccontextmanager
async def _connected(config: Config, url: str) -> AsyncIterator[TaskApp]:
    connection = connect_task_app(
        url,
        os.environ.get(config.services.api_key_env),
        config.services.headers,
        config.rollout.timeout_s,
        config.rollout.max_concurrent_rollouts,
        config.services.timeout_s,
    )
    async with AsyncExitStack() as stack:
        try:
            app = await stack.enter_async_context(connection)
        except ValueError as error:
            raise ConfigError("config", [f"services.task_url, .headers or .api_key_env: {error}"]) from None
        yield app


def rollout_settings(config: Config) -> RolloutSettings:
    """How every rollout of this config is asked for."""
    rollout = config.rollout
    return RolloutSettings(
        env_name=rollout.env_name or "task",
        policy_name=rollout.policy_name or "policy",
        model=config.model.label,
        sampling=SamplingParams(
            config.policy.max_tokens, temperature=config.policy.temperature, stop=config.policy.stop_sequences
        ),
        max_turns=rollout.max_turns,
        env_config=rollout.env_config,
        policy_config=rollout.policy_config,
        timeout_s=rollout.timeout_s,
        max_attempts=rollout.max_attempts,
        max_concurrent=rollout.max_concurrent_rollouts,
        session_id=config.run.name,
        ops=rollout.ops,
    )


async def _task_url(config: Config, task: AnyTask | None, stack: AsyncExitStack) -> str:
    if task is None:
        require_task(config)
        if config.services.task_url:
            return config.services.task_url
        task = _named_task(config.services.task_app or "")
    app = task if isinstance(task, FastAPI) else build_app(task, _own_keys(config))
    server = await stack.enter_async_context(await serve(app))
    return server.url


def _named_task(name: str) -> AnyTask:
    if name == "arithmetic":
        return {key: make() for key, make in TASKS.items()}
    if not name.endswith(".py") and not Path(name).exists():
        raise ConfigError("config", [f'services.task_app: {name!r} is neither a .py file nor bundled; bundled: "arithmetic"'])
    return load_task_file(name)


def _own_keys(config: Config) -> tuple[str, ...]:
    key = os.environ.get(config.services.api_key_env)
    return (key,) if key else ()


def _context_length(config: Config, policy: Policy) -> int:
    asked, most = config.serving.context_length, policy.config.max_position_embeddings
    if asked > most:
        raise ConfigError(
            "config", [f"serving.context_length: {asked} is more than the model's {most} positions; use <= {most}"]
        )
    return asked


def _sizes(taskset: Mapping[str, Any]) -> dict[str, int]:
    sizes = taskset.get("sizes")
    return {k: v for k, v in sizes.items() if isinstance(v, int) and v > 0} if isinstance(sizes, Mapping) else {}


def training_problems(config: Config, sizes: Mapping[str, int], step: int, count: int, *, round: int = 0) -> list[Problem]:
    """The problems of one step, a pure function of (config, step, round): nothing to save, nothing to lose on resume.

    Each epoch visits every problem of the split once, in an order of its own; a task app that states no sizes is given
    consecutive seeds. With `flat_groups = "refill"` every step has problems of its own for each of its rounds, used or not.
    """
    split, start = config.data.split, config.data.seed_start
    size = sizes.get(split)
    rounds = 1 + (config.algorithm.refill_rounds if config.algorithm.flat_groups == "refill" else 0)
    places = range((step * rounds + round) * count, (step * rounds + round + 1) * count)
    if size is None:
        return [Problem(start + i, split) for i in places]
    orders = {epoch: np.random.default_rng((config.run.seed, epoch)).permutation(size) for epoch in {i // size for i in places}}
    return [Problem(start + int(orders[i // size][i % size]), split) for i in places]
