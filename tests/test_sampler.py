"""The engine: bits that depend on the request alone, log-probabilities that are the trainer's, and how completions end."""

import asyncio
import itertools
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import VOCAB, done, group, micro, tiny_policy, turn

from gspo_jax import sampling
from gspo_jax.batch import Packing, pack
from gspo_jax.policy import logprobs_of
from gspo_jax.sampler import MAX_STOP_IDS, PREFILL_ROWS, Sampler
from rollout.types import Completion, SamplingParams

SLOTS, CONTEXT, SEED = 4, 40, 7
POLICY, PARAMS = tiny_policy(num_hidden_layers=1)
OTHER = tiny_policy(1, num_hidden_layers=1)[1]
PLAIN = SamplingParams(max_tokens=12, key=(0, 1, 2))
PROMPT = (5, 6, 7)


class Engine:
    """A sampler and the event loop it lives on, for tests that are not coroutines."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.watch: Any = None
        self.sampler = Sampler(POLICY, slots=SLOTS, context_length=CONTEXT, seed=SEED, decode=self.decode)
        self.run(self.sampler.publish(1, PARAMS))

    def decode(self, ids: Sequence[int]) -> str:
        if self.watch:
            self.watch(ids)
        return "".join(chr(0x4E00 + i) for i in ids)

    def run(self, work: Coroutine) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))

    def sample(self, *requests: tuple[Sequence[int], SamplingParams], gap: float = 0.0) -> list[Completion]:
        """All requests at once, or `gap` seconds apart."""

        async def late(i: int, prompt: Sequence[int], params: SamplingParams) -> Completion:
            await asyncio.sleep(i * gap)
            return await self.sampler.sample(prompt, params)

        async def together() -> list[Completion]:
            return list(await asyncio.gather(*(late(i, *r) for i, r in enumerate(requests))))

        return self.run(together())

    def one(self, prompt: Sequence[int] = PROMPT, params: SamplingParams = PLAIN, **changes: Any) -> Completion:
        return self.sample((prompt, replace(params, **changes)))[0]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.run(engine.sampler.aclose())
    engine.runner.close()


def trainer_logprobs(prompt: Sequence[int], completion: Completion, temperature: float, params=PARAMS) -> np.ndarray:
    trajectory = done(turn(prompt, completion.ids, completion.logprobs))
    batch = micro(pack([group(trajectory)], [[1.0]], 1, Packing(CONTEXT)))
    found, _ = SCORE[temperature](params, batch)
    return np.asarray(found)[batch.loss_mask]


SCORE = {t: jax.jit(logprobs_of(POLICY, temperature=t)) for t in (1.0, 0.6)}


def draws(rows: int, **changes: Any) -> sampling.Draws:
    base = sampling.Draws(
        jax.random.split(jax.random.key(3), rows), jnp.zeros(rows, jnp.int32), jnp.ones(rows), jnp.ones(rows),
        jnp.zeros(rows, jnp.int32), jnp.full((rows, MAX_STOP_IDS), 10**6, jnp.int32),
    )  # fmt: skip
    return base._replace(**{k: jnp.full_like(getattr(base, k), v) for k, v in changes.items()})


draw, draw_filtered = jax.jit(sampling.draw), jax.jit(sampling.draw_filtered)
inverse_cdf = jax.jit(sampling._inverse_cdf)


def test_request_is_bitwise_the_same_in_any_company(engine: Engine):
    """Alone, among more requests than slots, in another order and slot, and joining while others are decoded."""
    requests = [
        (PROMPT, PLAIN),
        ((9, 8, 7, 6, 5, 4, 3, 2, 1), replace(PLAIN, key=(0, 0, 1), temperature=0.6)),
        ((1,), replace(PLAIN, temperature=0.0, max_tokens=20)),
        (PROMPT, replace(PLAIN, key=(0, 1, 3), top_p=0.8)),
        ((2, 3), replace(PLAIN, key=(4,), top_k=3, max_tokens=5)),
        (tuple(range(1, 16)), replace(PLAIN, key=(5,), stop_ids=(3, 4, 5, 6, 7, 8, 9, 10), min_tokens=4)),
    ]
    alone = [engine.sample(request)[0] for request in requests]
    assert engine.sample(*requests) == alone
    order = [5, 3, 1, 0, 2, 4]
    shuffled = engine.sample(*(requests[i] for i in order), gap=0.03)
    assert [shuffled[order.index(i)] for i in range(len(requests))] == alone
    assert len({c.ids for c in alone}) == len(alone)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tok_03_alg_15_logprobs_are_the_trainers(engine: Engine, temperature: float):
    """Untouched weights: sampler and trainer agree per token, at the temperature the tokens were drawn with."""
    for member, prompt in enumerate([PROMPT, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]):
        found = engine.one(prompt, temperature=temperature, key=(9, member), max_tokens=25)
        assert len(found.ids) == len(found.logprobs) == len(found.versions) == 25
        np.testing.assert_allclose(found.logprobs, trainer_logprobs(prompt, found, temperature), atol=1e-4)
    other = trainer_logprobs(prompt, found, 1.0 if temperature == 0.6 else 0.6)
    assert np.abs(other - found.logprobs).max() > 0.05


def test_greedy_takes_the_largest_logit(engine: Engine):
    """Token by token against a fresh forward pass over everything so far; log-probabilities at temperature 1."""
    found = engine.one(temperature=0.0, max_tokens=8)
    assert engine.one(temperature=0.0, max_tokens=8, key=(99,)) == found
    for i, token in enumerate(found.ids):
        scores = [
            trainer_logprobs((*PROMPT, *found.ids[:i]), Completion((t,), (0.0,), (0,), "stop"), 1.0)[0] for t in range(VOCAB)
        ]
        assert int(np.argmax(scores)) == token
        assert found.logprobs[i] == pytest.approx(scores[token], abs=1e-4)
        if i == 2:
            break
    np.testing.assert_allclose(found.logprobs, trainer_logprobs(PROMPT, found, 1.0), atol=1e-4)


def test_det_03_members_differ_and_repeat(engine: Engine):
    """One prompt, several members: their own tokens each, the same again for the same key."""
    requests = [(PROMPT, replace(PLAIN, key=(0, 0, member))) for member in range(8)]
    first = engine.sample(*requests)
    assert len({c.ids for c in first}) == 8
    assert engine.sample(*requests) == first


def test_request_keys_differ_by_seed_and_by_path():
    paths = [(0, 1), (1, 0), (0, 1, 0), (1,), (0,), ()]
    keys = [jax.random.key_data(sampling.request_key(seed, path)).tobytes() for seed in (0, 1) for path in paths]
    assert len(set(keys)) == len(keys)
    assert keys[0] == jax.random.key_data(sampling.request_key(0, (0, 1))).tobytes()


def test_group_shares_its_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Four members of one prompt: one prefill, one row of it used."""
    seen, prefill = [], engine.sampler._prefill

    def counted(params, tokens, lengths):
        seen.append((tokens.copy(), lengths.copy()))
        return prefill(params, tokens, lengths)

    monkeypatch.setattr(engine.sampler, "_prefill", counted)
    engine.sample(*((PROMPT, replace(PLAIN, key=(m,))) for m in range(SLOTS)))
    ((tokens, lengths),) = seen
    assert tokens.shape[0] == PREFILL_ROWS
    assert lengths.tolist() == [3] + [1] * (PREFILL_ROWS - 1)
    assert tokens[0, :3].tolist() == list(PROMPT)
    assert not tokens[1:].any()


def test_tok_05_filtered_logprobs_are_renormalised():
    """p = (0.5, 0.3, 0.15, 0.05): top_p 0.8 keeps two, ln 0.625 and ln 0.375; top_k 3 keeps three."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.asarray(np.tile(np.log(p) + 3.0, (256, 1)), jnp.float32)
    for name, value, kept in (("top_p", 0.79, 2), ("top_p", 0.49, 1), ("top_p", 0.81, 3), ("top_k", 3, 3), ("top_k", 1, 1)):
        tokens, logprobs = map(np.asarray, draw_filtered(logits, draws(256, **{name: value})))
        assert set(tokens.tolist()) == set(range(kept))
        np.testing.assert_allclose(logprobs, np.log(p[:kept] / p[:kept].sum())[tokens], atol=1e-5)
    tokens, logprobs = map(np.asarray, draw_filtered(logits, draws(256, top_p=0.79)))
    assert logprobs[tokens == 0][0] == pytest.approx(-0.470004, abs=1e-5)
    both = draw_filtered(logits, draws(256, top_k=3, top_p=0.6))
    assert set(np.asarray(both[0]).tolist()) == {0, 1}


def test_filter_is_off_at_its_defaults():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((64, 700)) * 3, jnp.float32)
    tokens, logprobs = draw_filtered(logits, draws(64))
    expected = jax.nn.log_softmax(logits, -1)[np.arange(64), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_inverse_cdf_gives_each_token_its_share():
    """Over an even grid of 4096 uniforms every token is drawn its share of times, to within one, across blocks of the sum."""
    rng = np.random.default_rng(0)
    p = np.where(rng.random(600) < 0.5, rng.random(600) ** 4, 0)
    p[[0, 255, 256, 511, 599]] = [0, 0.3, 0, 0.2, 0]
    p = (p / p.sum()).astype(np.float32)
    size = 4096
    u = (np.arange(size) + 0.5) / size
    found = np.asarray(inverse_cdf(jnp.tile(jnp.asarray(p), (size, 1)), jnp.asarray(u, jnp.float32)))
    counts = np.bincount(found, minlength=600)
    assert np.abs(counts - p * size).max() < 1.01
    assert not counts[p == 0].any()
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("u", [0.0, 2**-24, 0.5, 1 - 2**-24])
def test_zero_probability_is_never_drawn(u: float):
    """Also where the sum runs out of precision, at both ends."""
    for support in ([5], [0, 599], [300, 301], [255, 256], [511, 512]):
        p = np.zeros((1, 600), np.float32)
        p[0, support] = 1 / len(support)
        assert int(inverse_cdf(jnp.asarray(p), jnp.asarray([u], jnp.float32))[0]) in support
    spread = np.full((1, 600), 1e-9, np.float32)
    spread[0, 7] = 0
    assert int(inverse_cdf(jnp.asarray(spread), jnp.asarray([u], jnp.float32))[0]) != 7


def test_draws_follow_the_distribution():
    """Chi-square over 8192 keys and 20 tokens; 19 degrees of freedom exceed 43.8 once in a thousand times."""
    logits = np.random.default_rng(1).standard_normal(20)
    for temperature in (1.0, 0.6):
        p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        tokens, logprobs = draw(jnp.tile(jnp.asarray(logits, jnp.float32), (8192, 1)), draws(8192, temperature=temperature))
        counts = np.bincount(np.asarray(tokens), minlength=20)
        assert (((counts - 8192 * p) ** 2) / (8192 * p)).sum() < 43.8
        np.testing.assert_allclose(logprobs, np.log(p)[np.asarray(tokens)], atol=1e-5)


def test_banned_ids_are_not_drawn_and_the_rest_is_renormalised():
    logits = jnp.zeros((512, 4))
    banned = draws(512)._replace(banned=jnp.full((512, MAX_STOP_IDS), 10**6).at[:, :2].set(jnp.array([0, 3])))
    for f in (draw, draw_filtered):
        tokens, logprobs = map(np.asarray, f(logits, banned))
        assert set(tokens.tolist()) == {1, 2}
        np.testing.assert_allclose(logprobs, math.log(0.5), atol=1e-6)


def test_tok_13_finish_reasons_come_from_what_ended_it(engine: Engine):
    """A stop id is recorded and ends with `stop`; the same id without being asked for ends with `length`."""
    free = engine.one()
    assert (len(free.ids), free.finish_reason) == (12, "length")
    last = next(i for i in range(2, 12) if free.ids[i] not in free.ids[:i])
    stopped = engine.one(stop_ids=(96, free.ids[last]))
    assert (stopped.ids, stopped.logprobs) == (free.ids[: last + 1], free.logprobs[: last + 1])
    assert stopped.finish_reason == "stop"
    cut = engine.one(max_tokens=last + 1)
    assert (cut.ids, cut.finish_reason) == (stopped.ids, "length")
    both = engine.one(max_tokens=last + 1, stop_ids=(free.ids[last],))
    assert (both.ids, both.finish_reason) == (stopped.ids, "stop")


def test_stop_string_ends_with_the_token_that_completes_it(engine: Engine):
    free = engine.one()
    text = engine.decode(free.ids[3:5])
    first = next(i for i in range(1, 12) if engine.decode(free.ids[: i + 1]).endswith(text))
    found = engine.one(stop=("never", text))
    assert (found.ids, found.finish_reason) == (free.ids[: first + 1], "stop")
    assert engine.one(stop=(text,), min_tokens=first + 3).ids == free.ids[: first + 3]


def test_min_tokens_bans_stop_ids_until_then(engine: Engine):
    likely = tuple(dict.fromkeys(engine.one(temperature=0.0, max_tokens=30).ids))[:MAX_STOP_IDS]
    for member in range(4):
        found = engine.one(stop_ids=likely, min_tokens=5, key=(member,), temperature=0.6)
        assert len(found.ids) >= 5
        assert not set(found.ids[:4]) & set(likely)
    early = [engine.one(stop_ids=likely, key=(member,), temperature=0.6) for member in range(4)]
    assert any(len(c.ids) < 5 for c in early)


def test_context_limit_ends_a_completion(engine: Engine):
    """Prompt and completion together fill the context, to the last place."""
    for length in (3, CONTEXT - 1):
        found = engine.one(list(range(1, length + 1)), max_tokens=1000)
        assert (len(found.ids), found.finish_reason) == (CONTEXT - length, "length")
        np.testing.assert_allclose(found.logprobs, trainer_logprobs(range(1, length + 1), found, 1.0), atol=1e-4)


def test_versions_change_with_the_weights_that_made_the_logits(engine: Engine):
    """A publish in the middle: tokens drawn from older logits keep the older version, and are the older policy's."""
    prompt, params = (1, 2, 3), SamplingParams(max_tokens=35, stop=("never",), key=(77,))

    async def interrupted() -> Completion:
        loop, reached = asyncio.get_running_loop(), asyncio.Event()
        engine.watch = lambda ids: loop.call_soon_threadsafe(reached.set) if len(ids) >= 5 else None
        running = asyncio.create_task(engine.sampler.sample(prompt, params))
        await reached.wait()
        await engine.sampler.publish(2, OTHER)
        return await running

    try:
        found = engine.run(interrupted())
    finally:
        engine.watch = None
    after = engine.one(prompt, params)
    engine.run(engine.sampler.publish(1, PARAMS))
    before = engine.one(prompt, params)
    assert set(before.versions) == {1}
    assert set(after.versions) == {2}
    old = found.versions.index(2)
    assert found.versions == (1,) * old + (2,) * (35 - old)
    assert 5 <= old < 35
    assert (found.ids[:old], found.logprobs[:old]) == (before.ids[:old], before.logprobs[:old])
    assert after.ids[0] != before.ids[0] or after.logprobs[0] != before.logprobs[0]
    under_old = trainer_logprobs(prompt, found, 1.0)
    assert abs(under_old[old] - found.logprobs[old]) > 1e-3


def test_cancelled_requests_free_their_slots(engine: Engine):
    """All slots busy and more waiting; all cancelled; the next one is served, with the bits it always has."""
    expected = engine.one()

    async def cancel_then_sample() -> Completion:
        started, loop = asyncio.Event(), asyncio.get_running_loop()
        engine.watch = lambda ids: loop.call_soon_threadsafe(started.set)
        long = SamplingParams(max_tokens=36, stop=("never",))
        tasks = [asyncio.create_task(engine.sampler.sample((1, 2, 3), replace(long, key=(i,)))) for i in range(SLOTS + 3)]
        await started.wait()
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(x, asyncio.CancelledError) for x in outcomes)
        return await engine.sampler.sample(PROMPT, PLAIN)

    try:
        assert engine.run(cancel_then_sample()) == expected
    finally:
        engine.watch = None
    assert not engine.sampler._waiting


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ((), {}, r"a prompt of 0 tokens must be 1\.\.39 \(serving.context_length\)"),
        (tuple(range(CONTEXT)), {}, r"a prompt of 40 tokens must be 1\.\.39"),
        (PROMPT, {"stop_ids": tuple(range(9))}, "at most 8 stop_ids"),
        (PROMPT, {"max_tokens": 0}, "max_tokens >= 1"),
        (PROMPT, {"temperature": -0.1}, "temperature >= 0"),
        (PROMPT, {"top_p": 0.0}, "0 < top_p <= 1"),
        (PROMPT, {"top_p": 1.5}, "0 < top_p <= 1"),
    ],
)
def test_request_out_of_range_is_refused(engine: Engine, prompt: tuple[int, ...], changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        engine.one(prompt, **changes)


def test_sampling_needs_weights_and_stop_strings_a_decoder():
    async def refused() -> None:
        sampler = Sampler(POLICY, slots=1, context_length=8, seed=0)
        with pytest.raises(RuntimeError, match="no weights were published"):
            await sampler.sample((1,), PLAIN)
        with pytest.raises(ValueError, match=r"stop=\('x',\) needs an engine that was given a decoder"):
            await sampler.sample((1,), replace(PLAIN, stop=("x",)))
        await sampler.aclose()

    asyncio.run(refused())


def test_weights_are_copied_to_the_compute_type_but_norms():
    """Matrices in bfloat16, scales in float32; the caller's masters are untouched."""
    policy, params = tiny_policy(dtype=jnp.bfloat16, num_hidden_layers=1)

    async def published() -> Any:
        sampler = Sampler(policy, slots=1, context_length=8, seed=0)
        await sampler.publish(3, params)
        await sampler.aclose()
        return sampler

    sampler = asyncio.run(published())
    assert sampler.version == 3
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert sampler._params["embedding"].dtype == jnp.bfloat16
    assert sampler._params["norm"]["scale"].dtype == jnp.float32


def test_buckets_cover_every_length_with_few_widths(engine: Engine):
    widths = [engine.sampler._bucket(n) for n in range(1, CONTEXT)]
    assert all(w >= n for n, w in enumerate(widths, 1))
    assert all(a <= b for a, b in itertools.pairwise(widths))
    assert len(set(widths)) <= 3
