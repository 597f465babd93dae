"""The gated delta rule against its definition, and Qwen3.5 wherever a state along the row could go wrong."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import VOCAB, done, group, micro, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gspo_jax import sampling
from gspo_jax.batch import Packing, pack
from gspo_jax.models import delta, qwen3_5
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy, load_policy, logprobs_of
from gspo_jax.sampler import Sampler
from gspo_jax.types import Params
from rollout.types import Completion, SamplingParams
from serving_bridge import trees
from serving_bridge.weights import leaf_shape

DATA = Path(__file__).parent / "data" / "models" / "qwen3_5"
ROWS, LENGTH, KEYS, VALUES, IN, OUT = 2, 24, 2, 4, 5, 3
LINEAR, FULL = "linear_attention", "full_attention"


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A config.json: a layer of linear attention, 2 key heads for 4 value heads, and one of full attention."""
    return {
        "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "max_position_embeddings": 256, "layer_types": [LINEAR, FULL], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 6,
        "linear_value_head_dim": 5, "linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES,
    } | overrides  # fmt: skip


def tiny_policy(**overrides: Any) -> tuple[Policy, Params]:
    """A policy and random parameters, large enough that every layer matters."""
    config = qwen3_5.Config.model_validate(tiny_config(**overrides))
    table, kind = qwen3_5.weights(config), jnp.dtype("float32")
    rng, params = np.random.default_rng(0), {}
    for row in table:
        leaf = rng.standard_normal(leaf_shape(row, config.sizes())) * (1 if row.path.endswith("conv") else 0.3)
        trees.put(params, row.path, jnp.asarray(1 + leaf if row.path.endswith("delta/norm/scale") else leaf, jnp.float32))
    return Policy(Path("tiny"), "qwen3_5", config, qwen3_5.Model(config, kind), table, kind), params


@pytest.fixture(scope="module")
def tiny() -> tuple[Policy, Params]:
    return tiny_policy()


class Inputs(NamedTuple):
    """Arguments of the rule."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    state: Any


def inputs(seed: int, length: int = LENGTH) -> Inputs:
    """Keys of length 1, decays from almost none to almost all."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((ROWS, length, KEYS, IN))
    return Inputs(
        rng.standard_normal(k.shape),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.standard_normal((ROWS, length, VALUES, OUT)),
        -np.exp(rng.uniform(-7, 3, (ROWS, length, VALUES))),
        rng.random((ROWS, length, VALUES)),
        rng.standard_normal((ROWS, VALUES, IN, OUT)),
    )


def spots_of(lengths: list[int], gaps: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of a row: segments of these lengths, padding of these lengths before each, and at the end."""
    positions, segments, at = np.zeros(length, np.int32), np.zeros(length, np.int32), 0
    for number, (n, gap) in enumerate(zip(lengths, gaps, strict=False), 1):
        at += gap
        positions[at : at + n] = np.arange(len(positions[at : at + n]))
        segments[at : at + n] = number
        at += n
    return positions, segments


def masked(x: Inputs, valid: np.ndarray) -> Inputs:
    there = valid[..., None]
    return x._replace(log_decay=np.where(there, x.log_decay, 0), beta=np.where(there, x.beta, 0))


def narrow(x: Inputs) -> Inputs:
    return jax.tree.map(lambda a: np.asarray(a, np.float32), x)


def by_definition(x: Inputs, starts: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, head by head: decay, replace a part of what the key recalls by the value, read with the query."""
    out, final = np.zeros(x.v.shape), np.zeros(x.state.shape)
    for b in range(ROWS):
        for m in range(VALUES):
            n, state = m * KEYS // VALUES, x.state[b, m]
            for t in np.flatnonzero(valid[b]):
                state = (0 if starts[b, t] else np.exp(x.log_decay[b, t, m])) * state
                k = x.k[b, t, n]
                state = state + x.beta[b, t, m] * np.outer(k, x.v[b, t, m] - k @ state)
                out[b, t, m] = x.q[b, t, n] @ state
            final[b, m] = state
    return out, final


@partial(jax.jit, static_argnames="chunk")
def by_chunks(x: Inputs, starts, chunk: int):
    return delta.gated_delta_rule(x.q, x.k, x.v, delta.Gates(x.log_decay, x.beta, starts), x.state, chunk)


@jax.jit
def by_steps(x: Inputs, starts):
    def step(state, token):
        q, k, v, log_decay, beta, start = token
        gates = delta.Gates(log_decay[:, None], beta[:, None], start[:, None])
        out, state = delta.gated_delta_step(q, k, v, gates, state)
        return state, out

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (*x[:-1], starts))
    state, out = jax.lax.scan(step, x.state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def pulled(rule, x: Inputs, *rest) -> Inputs:
    """Gradient of a sum in which every output counts differently."""

    def total(x: Inputs):
        out, state = rule(x, *rest)
        return jnp.sum(jnp.sin(out + jnp.arange(out.size).reshape(out.shape) % 7)) + jnp.sum(jnp.cos(state))

    return jax.grad(total)(x)


PULLED = {chunk: jax.jit(partial(pulled, partial(by_chunks, chunk=chunk))) for chunk in (7, 64)}
PULLED[0] = jax.jit(partial(pulled, by_steps))
LAYOUTS = st.tuples(st.lists(st.integers(1, 14), max_size=5), st.lists(st.integers(0, 4), min_size=5, max_size=5))


@given(st.lists(LAYOUTS, min_size=ROWS, max_size=ROWS), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=25)
def test_chunks_are_the_definition(rows, continued: bool, seed: int):
    """Any layout, chunks of 1, 7 (not a divisor) and all tokens; the gradient is that of the steps. In float64."""
    laid = [spots_of(lengths, gaps, LENGTH) for lengths, gaps in rows]
    positions, segments = (np.stack(each) for each in zip(*laid, strict=True))
    valid = segments > 0
    if continued:  # the first segment goes on from the given state
        positions = positions + np.where(segments == 1, 5, 0)
    starts = valid & (positions == 0)
    with jax.enable_x64(True):
        x = masked(inputs(seed), valid)
        out, state = by_definition(x, starts, valid)
        for chunk in (1, 7, 64):
            found = by_chunks(x, starts, chunk=chunk)
            np.testing.assert_allclose(np.where(valid[..., None, None], found[0], 0), out, atol=1e-10)
            np.testing.assert_allclose(found[1], state, atol=1e-10)
        for a, b in zip(PULLED[7](x, starts), PULLED[0](x, starts), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -30.0, -1e4])
def test_float32_holds_at_the_extremes(log_decay: float):
    """Equal keys at full rate, where powers of the triangular system grow like binomials; decays of nothing and everything."""
    x = inputs(0, 200)
    x = x._replace(k=np.broadcast_to(x.k[:, :1], x.k.shape), beta=np.ones_like(x.beta), log_decay=0 * x.beta + log_decay)
    starts = np.zeros((ROWS, 200), bool)
    out, state = by_definition(x, starts, ~starts)
    found = by_chunks(narrow(x), starts, chunk=64)
    np.testing.assert_allclose(found[0], out, atol=2e-5)
    np.testing.assert_allclose(found[1], state, atol=2e-5)
    with jax.enable_x64(True):
        expected = PULLED[0](x, starts)
    for a, b in zip(PULLED[64](narrow(x), starts), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(np.abs(b).max())))


def test_padding_alone_keeps_the_state_and_has_no_gradient():
    """Nothing valid: the state to the bit, and derivatives that are zero, not NaN, even of keys that are zero."""
    starts = np.zeros((ROWS, 200), bool)
    x = narrow(masked(inputs(1, 200), starts))
    x = x._replace(k=np.zeros_like(x.k))
    for rule in (by_steps, partial(by_chunks, chunk=64)):
        assert (np.asarray(rule(x, starts)[1]) == x.state).all()
    grads = PULLED[64](x, starts)
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.asarray(grads.v).any()
    assert np.isfinite(jax.grad(lambda k: jnp.sum(delta.unit(k)))(jnp.zeros((2, IN)))).all()


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_inverse_of_a_unit_triangle(size: int):
    """Numpy's in float64, and its derivative along a direction: `-X dA X`."""
    rng = np.random.default_rng(size)
    a, d = (np.tril(rng.uniform(-1, 1, (3, size, size)), -1) / 4 for _ in range(2))
    expected = np.linalg.inv(np.eye(size) + a)
    with jax.enable_x64(True):
        found, pull = jax.vjp(delta.unit_lower_inverse, jnp.asarray(a))
        np.testing.assert_allclose(found, expected, atol=1e-9)
        weight = rng.standard_normal(a.shape)
        change = -expected @ d @ expected
        np.testing.assert_allclose(np.sum(pull(weight)[0] * d), np.sum(weight * change), atol=1e-9)


def test_convolution_is_numpys_within_each_segment():
    """Also over rows cut in two with the memory handed on, by any number of valid inputs, none included."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, LENGTH, 6), (6, 4)))
    positions, segments = spots_of([9, 1, 2, 7], [1, 2, 0, 1], LENGTH)
    nothing = jnp.zeros((1, 3, 6))
    found = np.asarray(delta.short_convolution(x, nothing + 9, weight, positions[None]))[0]
    for number in range(1, 5):
        inside = segments == number
        for c in range(6):
            full = np.convolve(x[0, inside, c], weight[c, ::-1])
            np.testing.assert_allclose(found[inside, c], full[: inside.sum()], atol=1e-5)
    at = jnp.arange(LENGTH)[None]
    whole = np.asarray(delta.short_convolution(x, nothing, weight, at))
    for n in (0, 1, 2, 3, 8):
        memory = delta.remembered(x[:, :10], nothing, at[:, :10] < n)
        rest = delta.short_convolution(x[:, n:], memory, weight, at[:, n:])
        np.testing.assert_allclose(rest, whole[:, n:], atol=1e-6)


def biggest(program: Any) -> int:
    """Elements of the largest array of a program, inner programs included."""
    equations = getattr(program, "jaxpr", program).eqns
    inner = [v for e in equations for v in e.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
    return max([v.aval.size for e in equations for v in e.outvars] + [biggest(each) for each in inner], default=0)


def test_memory_grows_linearly_with_the_row():
    """No array, forward or backward, grows faster than the row."""
    found = []
    for length in (512, 2048):
        x, starts = inputs(0, length), np.zeros((ROWS, length), bool)
        found.append(biggest(jax.make_jaxpr(partial(pulled, partial(by_chunks, chunk=64)))(x, starts)))
    assert found[1] == 4 * found[0]


def hidden_states(policy: Policy):
    return jax.jit(lambda params, ids, spots: policy.model.apply({"params": params}, ids, spots).hidden)


def test_golden_logits_with_padding_between_packed_sequences():
    """Three sequences in one row of three chunks, padding before, between and after: logits of each as alone."""
    policy, params = load_policy(DATA)
    golden = np.load(DATA / "golden.npz")
    ids = golden["input_ids"]
    positions, segments = spots_of([ids.shape[1]] * 3, [2, 1, 30], 160)
    tokens = np.full((1, 160), 7, np.int32)
    tokens[0, segments > 0] = ids.ravel()
    hidden = hidden_states(policy)(params, tokens, Spots(positions[None], segments[None]))
    logits = np.asarray(hidden @ policy.head(params).T)[0, segments > 0]
    np.testing.assert_allclose(logits.reshape(golden["logits"].shape), golden["logits"], atol=2e-4)


PATTERNS = [(FULL, LINEAR, LINEAR), (LINEAR, FULL) * 2, (LINEAR,) * 2, (FULL,) * 2]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_pattern_of_layers_agrees_with_its_cache(pattern: tuple[str, ...]):
    """Whole rows, and prompts shorter and longer than the convolution, then token by token in other slots."""
    policy, params = tiny_policy(layer_types=pattern, num_hidden_layers=len(pattern))
    ids = np.random.default_rng(0).integers(1, VOCAB, (3, 12)).astype(np.int32)
    at = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)
    expected = np.asarray(hidden_states(policy)(params, ids, Spots(at, np.ones_like(at))) @ policy.head(params).T)
    lengths = np.array([1, 3, 7], np.int32)
    prompts = jax.jit(partial(sampling.prefill, policy))(params, np.where(at < lengths[:, None], ids, 0)[:, :8], lengths)
    np.testing.assert_allclose(prompts.logits, expected[np.arange(3), lengths - 1], atol=1e-4)
    slots = sampling.empty_slots(policy, 4, 12)
    for row, slot in enumerate((3, 0, 2)):
        slots = INSERT(slots, prompts, np.int32(row), np.int32(slot))
    decode = jax.jit(partial(sampling.decode, policy))
    now = np.array([3, 12, 7, 1], np.int32)  # by slot; 12 is beyond the cache: free
    row = np.array([1, 0, 2, 0])
    while (now < 12).any():
        running = np.flatnonzero(now < 12)
        before = slots.cache
        slots = decode(params, slots, np.where(now < 12, ids[row, np.minimum(now, 11)], 5), np.minimum(now, 12))
        np.testing.assert_allclose(slots.logits[running], expected[row[running], now[running]], atol=1e-4)
        for a, b in zip(before, slots.cache, strict=True):
            assert (np.asarray(a)[:, now >= 12] == np.asarray(b)[:, now >= 12]).all()
        now[running] += 1


INSERT = jax.jit(sampling.insert)


def test_gradient_of_packed_rows_is_that_of_separate_ones(tiny):
    """Completions of different lengths in one row against one a row, blank rows among them."""
    policy, params = tiny
    rng = np.random.default_rng(3)
    groups = [group(done(turn(rng.integers(1, VOCAB, 2).tolist(), rng.integers(1, VOCAB, n).tolist()))) for n in (3, 17, 8)]
    logprobs = logprobs_of(policy)

    @jax.jit
    def gradient(params: Params, batch):
        return jax.grad(lambda p: sum(jnp.sum(jnp.sin(3 * x)) for x in logprobs(p, batch)))(params)

    packed, separate = (
        gradient(params, micro(pack(groups, [[1.0]] * 3, 3, Packing(40, 4, mode)))) for mode in ("packed", "padded")
    )
    for path, leaf in trees.leaves(packed):
        other = dict(trees.leaves(separate))[path]
        assert np.abs(leaf).max() > 0, path
        np.testing.assert_allclose(leaf, other, atol=2e-5 * float(np.abs(other).max()), err_msg=path)


@pytest.fixture(scope="module")
def score(tiny):
    return jax.jit(logprobs_of(tiny[0]))


def test_shared_prompts_are_nan_not_wrong(tiny, score):
    """A branching prompt cannot be computed: every number of the micro-batch says so. Without one, none does."""
    pair = group(done(turn([1, 2], [3, 4])), done(turn([1, 2], [5]), member=1))
    for mode, bad in (("shared_prefix", True), ("packed", False)):
        batch = micro(pack([pair], [[1.0, 1.0]], 2, Packing(32, 1, mode)))
        assert all(np.isnan(x).all() if bad else np.isfinite(x).all() for x in score(tiny[1], batch))


PLAIN = SamplingParams(max_tokens=9, key=(0, 1))
REQUESTS = [
    ((5, 6, 7), PLAIN),
    ((1,), replace(PLAIN, key=(1,), temperature=0.0)),
    (tuple(range(1, 14)), replace(PLAIN, key=(2,), temperature=0.6, max_tokens=14)),
    ((5, 6, 7), replace(PLAIN, key=(3,), max_tokens=3)),
]


def test_request_is_bitwise_the_same_in_any_company(tiny, score):
    """Alone, together in fewer slots, reversed and late: the same tokens and bits, and log-probabilities as trained on."""
    policy, params = tiny

    async def run() -> list[list[Completion]]:
        sampler = Sampler(policy, slots=3, context_length=32, seed=7)
        await sampler.publish(1, params)

        async def late(i: int, request: tuple) -> Completion:
            await asyncio.sleep(0.03 * i)
            return await sampler.sample(*request)

        alone = [await sampler.sample(*request) for request in REQUESTS]
        together = await asyncio.gather(*(sampler.sample(*request) for request in REQUESTS))
        reverse = await asyncio.gather(*(late(i, request) for i, request in enumerate(REQUESTS[::-1])))
        await sampler.aclose()
        return [alone, list(together), list(reverse)[::-1]]

    alone, together, reverse = asyncio.run(asyncio.wait_for(run(), 120))
    assert together == alone
    assert reverse == alone
    for (prompt, _), found in list(zip(REQUESTS, alone, strict=True))[::3]:
        batch = micro(pack([group(done(turn(prompt, found.ids, found.logprobs)))], [[1.0]], 1, Packing(32)))
        np.testing.assert_allclose(found.logprobs, np.asarray(score(params, batch)[0])[batch.loss_mask], atol=1e-4)


def test_older_spellings_of_the_config():
    """Every third layer full; a quarter of the head rotated unless said, wherever it is said."""
    raw = {k: v for k, v in tiny_config(num_hidden_layers=6).items() if k != "layer_types"}
    config = qwen3_5.Config.model_validate(raw | {"full_attention_interval": 3, "partial_rotary_factor": 0.5})
    assert config.kinds == ("linear", "linear", "full") * 2
    assert len(config.rope().frequencies) == 0.5 * 8 / 2
    default = qwen3_5.Config.model_validate(raw)
    assert default.kinds == ("linear",) * 3 + ("full",) + ("linear",) * 2
    assert len(default.rope().frequencies) == 0.25 * 8 / 2
    inner = {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    both = raw | {"rope_parameters": inner, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    nested = {"model_type": "qwen3_5", "text_config": both, "vision_config": {}}
    assert len(qwen3_5.Config.model_validate(nested).rope().frequencies) == 8 / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 must be a multiple of linear_num_key_heads=2"),
        ({"layer_types": [LINEAR, "sliding_attention"]}, "sliding_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval=0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"linear_something": 2}, "linear_something=2"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        qwen3_5.Config.model_validate(tiny_config(**change))
