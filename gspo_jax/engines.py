"""Who samples: the embedded JAX sampler, or vLLM servers. The rest of a run sees one `Engine`."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from gspo_jax.sampler import Sampler
from gspo_jax.sections import Config
from gspo_jax.start import Start
from gspo_jax.types import Params
from gspo_jax.vllm_engine import OnEvent, gather_served, open_served
from rollout.types import Completion, SamplingParams
from serving_bridge.chat import Chat


@runtime_checkable
class Engine(Protocol):
    """What samples completions, and what new weights are published to."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion; see `rollout.types.Sample`."""
        ...

    async def publish(self, version: int, params: Params) -> dict[str, float]:
        """From now on the policy is `params`, what is trained, called `version`. Returns what was measured, as metrics."""
        ...


class Embedded:
    """The JAX sampler as an engine."""

    def __init__(self, sampler: Sampler, start: Start, gathered: Callable[[Params], Params], *, copy: bool):
        self._sampler, self._start, self._gathered, self._copy = sampler, start, gathered, copy
        self._frozen: Params | None = None

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await self._sampler.sample(prompt_ids, params)

    async def publish(self, version: int, params: Params) -> dict[str, float]:
        here = self._gathered(params)
        if self._frozen is None and self._start.frozen is not None:
            self._frozen = self._gathered(self._start.frozen)
        if self._copy:  # the next update overwrites these buffers while requests are in flight
            here = jax.tree.map(jnp.copy, here)
        await self._sampler.publish(version, self._start.whole(here, self._frozen))
        return {}


def gather_published(config: Config, start: Start) -> Callable[[int, Params], None]:
    """What a process without an engine does while process 0 publishes `(version, params)`: its part of the gathering."""
    if config.serving.engine == "vllm":
        return gather_served(config, start)
    gathered: list[Params] = []

    def publish(version: int, params: Params) -> None:
        start.layout.gathered(params)
        if not gathered and start.frozen is not None:
            start.layout.gathered(start.frozen)
            gathered.append({})

    return publish


@asynccontextmanager
async def open_engine(
    config: Config,
    start: Start,
    chat: Chat,
    context_length: int,
    run_dir: Path,
    on_event: OnEvent,
    gathered: Callable[[Params], Params],
) -> AsyncIterator[Engine]:
    """The engine that `[serving]` asks for; everything it started has ended when the block is left.

    `run_dir`: where servers log. `gathered`: parameters whole on one device, for the embedded sampler. Raises ConfigError,
    ServerDied, ServerError, FleetError.
    """
    if config.serving.engine != "vllm":
        sampler = Sampler(
            start.policy, slots=config.serving.slots, context_length=context_length, seed=config.run.seed, decode=chat.decode,
            record_experts=config.algorithm.routing_replay == "sampler",
        )  # fmt: skip
        try:
            yield Embedded(sampler, start, gathered, copy=config.rollout.max_staleness > 0)
        finally:
            await sampler.aclose()
        return
    async with open_served(config, start, chat, context_length, run_dir, on_event) as served:
        yield served
