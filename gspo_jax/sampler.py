"""The JAX engine: continuous batching over fixed slots. It knows ids, never text (but for stop strings, through `decode`)."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sampling
from gspo_jax.policy import Policy, serving_params
from gspo_jax.types import Params
from rollout.types import Completion, Experts, FinishReason, SamplingParams

PREFILL_ROWS = 8
"""Distinct prompts in one prefill; always this many, so that a prompt's bits do not depend on how many came with it."""
GATHER_SECONDS = 0.01
"""Quiet time after a new request before it is admitted, so that a group's members share their prefill."""
MAX_STOP_IDS = 8


@dataclass(eq=False)
class Request:
    """One sampling call and what it has drawn so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    future: asyncio.Future
    key: Any
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    """`[l n k]` of the tokens processed together, if they are recorded."""

    @property
    def filtered(self) -> bool:
        return self.params.top_p < 1 or self.params.top_k > 0


class Sampler:
    """An engine: `await sampler.sample(prompt_ids, params)`. A request's tokens and log-probabilities depend on its prompt,
    its parameters, the weights and the seed alone: not on companions, arrival order or slot.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        context_length: int,
        seed: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        record_experts: bool = False,
    ) -> None:
        self.context_length, self.version, self._policy, self._seed = context_length, -1, policy, seed
        self._decode_text, self._record_experts = decode, record_experts
        self._params: Params = {}
        self._waiting: list[Request] = []
        self._active: list[Request | None] = [None] * slots
        self._logit_version = [0] * slots
        self._work, self._lock = asyncio.Event(), asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "sampler")
        self._loop: asyncio.Task | None = None
        self._slots = sampling.empty_slots(policy, slots, context_length)
        self._keys = jax.random.split(jax.random.key(0), slots)
        self._prefill = jax.jit(partial(sampling.prefill, policy))
        self._insert = jax.jit(sampling.insert, donate_argnums=0)
        self._decode = jax.jit(partial(sampling.decode, policy), donate_argnums=1)
        self._draw, self._draw_filtered = jax.jit(sampling.draw), jax.jit(sampling.draw_filtered)

    async def publish(self, version: int, params: Params) -> None:
        """Use these weights from the next token on; tokens drawn from logits of older weights keep the older version."""
        async with self._lock:
            self._params = serving_params(params, self._policy.dtype)
            self.version = version

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion. ValueError when the prompt leaves no room for a token or a parameter is out of range."""
        room = self.context_length - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens must be 1..{self.context_length - 1} (serving.context_length)"
            )
        if len(params.stop_ids) > MAX_STOP_IDS or params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
            raise ValueError(
                f"{params}: needs max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, at most {MAX_STOP_IDS} stop_ids"
            )
        if params.stop and self._decode_text is None:
            raise ValueError(f"stop={params.stop!r} needs an engine that was given a decoder")
        if self.version < 0:
            raise RuntimeError("no weights were published to the sampler yet")
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        future = asyncio.get_running_loop().create_future()
        request = Request(tuple(prompt_ids), params, future, sampling.request_key(self._seed, params.key))
        self._waiting.append(request)
        self._work.set()
        return await future

    async def aclose(self) -> None:
        """Stop; requests still running are cancelled."""
        if self._loop:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for request in [*self._waiting, *filter(None, self._active)]:
            request.future.cancel()
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._waiting and not any(self._active):
                    self._work.clear()
                    await self._work.wait()
                await self._gather()
                async with self._lock:
                    await loop.run_in_executor(self._thread, self._tick, self._take())
                self._deliver()
        except Exception as error:
            for request in [*self._waiting, *filter(None, self._active)]:
                if not request.future.done():
                    request.future.set_exception(error)
            self._waiting, self._active = [], [None] * len(self._active)
            raise

    async def _gather(self) -> None:
        """Wait while requests keep arriving, at most until the free slots are spoken for."""
        seen = -1
        while len(self._waiting) not in (0, seen) and len(self._waiting) < self._active.count(None):
            seen = len(self._waiting)
            await asyncio.sleep(GATHER_SECONDS)

    def _take(self) -> list[tuple[int, Request]]:
        """The oldest waiting requests, each with a free slot."""
        waiting = [r for r in self._waiting if not r.future.cancelled()]
        free = [slot for slot, request in enumerate(self._active) if request is None]
        self._waiting = waiting[len(free) :]
        return list(zip(free, waiting, strict=False))

    def _deliver(self) -> None:
        """Hand out what is finished, free slots of the cancelled. On the event loop: futures are not thread-safe."""
        for slot, request in enumerate(self._active):
            if request is None:
                continue
            reason = self._finish_reason(request)
            if request.future.cancelled():
                self._active[slot] = None
            elif reason:
                drawn = (tuple(request.ids), tuple(request.logprobs), tuple(request.versions), reason)
                request.future.set_result(Completion(*drawn, experts=_nested(request.experts)))
                self._active[slot] = None

    def _finish_reason(self, request: Request) -> FinishReason | None:
        ids, params = request.ids, request.params
        if not ids:
            return None
        if len(ids) >= params.min_tokens:
            if ids[-1] in params.stop_ids:
                return "stop"
            if params.stop and self._decode_text is not None:
                text = self._decode_text(ids)
                if any(s in text for s in params.stop):
                    return "stop"
        full = len(ids) >= params.max_tokens or len(request.prompt) + len(ids) >= self.context_length
        return "length" if full else None

    def _tick(self, admitted: list[tuple[int, Request]]) -> None:
        """Admit, draw a token in every slot, and, for those that go on, run the model one token further."""
        self._admit(admitted)
        if not any(self._active):
            return
        tokens = self._draw_tokens()
        positions = np.full(len(self._active), self.context_length, np.int32)
        for slot, request in enumerate(self._active):
            if request is not None and self._finish_reason(request) is None:
                positions[slot] = len(request.prompt) + len(request.ids) - 1
                self._logit_version[slot] = self.version
        if (positions < self.context_length).any():
            self._slots, experts = self._recorded(self._decode(self._params, self._slots, tokens, positions))
            for slot, request in enumerate(self._active):
                if request is not None and experts is not None and positions[slot] < self.context_length:
                    request.experts.append(experts[:, slot])

    def _admit(self, admitted: list[tuple[int, Request]]) -> None:
        """Fill the slots; each distinct prompt is computed once."""
        buckets: dict[int, dict[tuple[int, ...], list[tuple[int, Request]]]] = {}
        for slot, request in admitted:
            prompts = buckets.setdefault(self._bucket(len(request.prompt)), {})
            prompts.setdefault(request.prompt, []).append((slot, request))
        for width, prompts in buckets.items():
            items = list(prompts.items())
            for i in range(0, len(items), PREFILL_ROWS):
                self._admit_rows(width, items[i : i + PREFILL_ROWS])

    def _admit_rows(self, width: int, items: list[tuple[tuple[int, ...], list[tuple[int, Request]]]]) -> None:
        tokens, lengths = np.zeros((PREFILL_ROWS, width), np.int32), np.ones(PREFILL_ROWS, np.int32)
        for row, (prompt, _) in enumerate(items):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        prompts, experts = self._recorded(self._prefill(self._params, tokens, lengths))
        for row, (prompt, members) in enumerate(items):
            for slot, request in members:
                if experts is not None:
                    request.experts.append(experts[:, row, : len(prompt)])
                self._slots = self._insert(self._slots, prompts, np.int32(row), np.int32(slot))
                self._keys = self._keys.at[slot].set(request.key)
                self._logit_version[slot] = self.version
                self._active[slot] = request

    def _recorded(self, slots: sampling.Slots) -> tuple[sampling.Slots, np.ndarray | None]:
        """Slots without the experts chosen on the way, and these `[l b t k]` if they are recorded."""
        experts = jax.device_get(slots.experts) if self._record_experts else None
        return slots._replace(experts=None), experts

    def _bucket(self, length: int) -> int:
        """The compiled width for a prompt: two per octave, multiples of 16, at most the context."""
        step = max(16, 1 << max((length - 1).bit_length() - 2, 0))
        return min(-(-length // step) * step, self.context_length)

    def _draw_tokens(self) -> np.ndarray:
        draws = self._draws()
        tokens, logprobs = jax.device_get(self._draw(self._slots.logits, draws))
        filtered = [s for s, r in enumerate(self._active) if r is not None and r.filtered]
        if filtered:
            tokens, logprobs = np.array(tokens), np.array(logprobs)
            other = jax.device_get(self._draw_filtered(self._slots.logits, draws))
            tokens[filtered], logprobs[filtered] = other[0][filtered], other[1][filtered]
        for slot, request in enumerate(self._active):
            if request is not None and self._finish_reason(request) is None:
                request.ids.append(int(tokens[slot]))
                request.logprobs.append(float(logprobs[slot]))
                request.versions.append(self._logit_version[slot])
        return np.asarray(tokens, np.int32)

    def _draws(self) -> sampling.Draws:
        size = len(self._active)
        index, top_k = np.zeros(size, np.int32), np.zeros(size, np.int32)
        temperature, top_p = np.ones(size, np.float32), np.ones(size, np.float32)
        banned = np.full((size, MAX_STOP_IDS), self._policy.config.vocab_size, np.int32)
        for slot, request in enumerate(self._active):
            if request is not None:
                p = request.params
                index[slot], temperature[slot], top_p[slot], top_k[slot] = len(request.ids), p.temperature, p.top_p, p.top_k
                if len(request.ids) < p.min_tokens:
                    banned[slot, : len(p.stop_ids)] = p.stop_ids
        return sampling.Draws(self._keys, *map(jnp.asarray, (index, temperature, top_p, top_k, banned)))


def _nested(parts: Sequence[np.ndarray]) -> Experts | None:
    """Recorded choices by token, layer and rank, -1 at the last token, which was drawn and never processed."""
    if not parts:
        return None
    found = np.concatenate([*parts, np.full_like(parts[0][:, :1], -1)], 1).swapaxes(0, 1)
    return tuple(tuple(map(tuple, token)) for token in found.tolist())
