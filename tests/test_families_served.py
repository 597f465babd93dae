"""Every architecture through the cache and the sampler against reference logits, in bfloat16, its weights there and back."""

import asyncio
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers_families import ONE_EACH, QUICK, TOLERANCE, Family, load_family
from helpers_model import done, group, micro, turn
from safetensors.numpy import load_file

from gspo_jax.batch import Packing, pack
from gspo_jax.policy import describe_policy, load_policy, logprobs_of, save_policy
from gspo_jax.sampler import PREFILL_ROWS
from rollout.types import SamplingParams
from serving_bridge.convert import save_folder


@pytest.fixture(scope="module", params=ONE_EACH)
def family(request) -> Family:
    return load_family(request.param)


def test_logits_through_the_cache_token_by_token(family: Family):
    """Right-padded prompts of unequal length, then one token at a time, each slot at its own place."""
    engine, params, ids, golden = family.sampler, family.params, family.ids, family.data["logits"]
    tokens, lengths = np.zeros((PREFILL_ROWS, 16), np.int32), np.ones(PREFILL_ROWS, np.int32)
    lengths[:3] = 1, 9, 16
    for row, n in enumerate(lengths[:3]):
        tokens[row, :n] = ids[row, :n]
    prompts = engine._prefill(params, tokens, lengths)
    np.testing.assert_allclose(prompts.logits[:3], golden[np.arange(3), lengths[:3] - 1], atol=TOLERANCE)
    slots, where = jax.tree.map(jnp.copy, engine._slots), (3, 0, 2)
    for row, slot in enumerate(where):
        slots = engine._insert(slots, prompts, np.int32(row), np.int32(slot))
    at = lengths[:3].copy()
    while (at < ids.shape[1]).any():
        tokens, positions = np.zeros(4, np.int32), np.full(4, 40, np.int32)
        running = [row for row in range(3) if at[row] < ids.shape[1]]
        for row in running:
            tokens[where[row]], positions[where[row]] = ids[row, at[row]], at[row]
        slots = engine._decode(params, slots, tokens, positions)
        for row in running:
            np.testing.assert_allclose(slots.logits[where[row]], golden[row, at[row]], atol=TOLERANCE)
            at[row] += 1


def test_sampler_reports_the_trainers_logprobs_and_the_same_bits_alone_or_in_company(family: Family):
    prompts = [family.ids[i, :n].tolist() for i, n in enumerate((1, 9, 16))]

    async def completions():
        await family.sampler.publish(0, family.params)
        requests = [(prompt, SamplingParams(max_tokens=40, key=(i,))) for i, prompt in enumerate(prompts)]
        together = await asyncio.gather(*(family.sampler.sample(*request) for request in requests))
        alone = [await family.sampler.sample(*request) for request in reversed(requests)]
        await family.sampler.aclose()
        return together, alone[::-1]

    completions, alone = asyncio.run(completions())
    assert completions == alone
    assert [len(p) + len(c.ids) for p, c in zip(prompts, completions, strict=True)] == [40, 40, 40]
    batch = family.batch._replace(
        tokens=family.batch.tokens.copy(), positions=family.batch.positions.copy(), loss_mask=family.batch.loss_mask.copy(),
        segment_ids=family.batch.segment_ids.copy(), parents=family.batch.parents.copy(),
    )  # fmt: skip
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 2):
        alone = micro(pack([group(done(turn(prompt, completion.ids)))], [[1.0]], 1, Packing(111, 1, "packed")))
        for name in ("tokens", "positions", "loss_mask", "segment_ids", "parents"):
            getattr(batch, name)[row] = getattr(alone, name)[0]
    found = np.asarray(family.logprobs(family.params, batch)[0])
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 2):
        np.testing.assert_allclose(completion.logprobs, found[row, len(prompt) : 40], atol=TOLERANCE)


def test_computing_in_bfloat16_is_near(family: Family):
    """Eight bits of mantissa: logits are off by far less than they vary, and by more than float32 would be."""
    policy = describe_policy(family.folder, compute_dtype="bfloat16", remat="none")
    found = jax.jit(logprobs_of(policy), compiler_options=QUICK)(family.params, family.batch)[0]
    assert found.dtype == np.float32
    off = np.abs(np.asarray(found)[0].reshape(family.ids.shape)[:, 1:] - family.data["next_logprobs"])
    assert off.max() > TOLERANCE
    assert off.mean() < 0.1 * family.data["logits"].std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_then_load_then_export_is_the_identity(family: Family, tmp_path: Path, dtype: str):
    """Bit for bit, in one file and in shards with an index."""
    policy, numpy_dtype = family.policy, np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    save_policy(policy, family.params, tmp_path / "one", dtype=dtype)
    save_folder(tmp_path / "many", family.params, policy.table, policy.config.sizes(),
                source_folder=policy.folder, dtype=dtype, max_shard_bytes=50_000)  # fmt: skip
    one = load_file(tmp_path / "one" / "model.safetensors")
    shards = sorted((tmp_path / "many").glob("model-*.safetensors"))
    many = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    source = load_file(family.folder / "model.safetensors")
    assert len(shards) > 2
    assert one.keys() == many.keys() == source.keys()
    for name, tensor in source.items():
        assert one[name].dtype == many[name].dtype == numpy_dtype
        assert one[name].tobytes() == many[name].tobytes() == tensor.astype(numpy_dtype).tobytes()
    again, params = load_policy(tmp_path / "many")
    assert jax.tree.structure(params) == jax.tree.structure(family.params)
    for a, b in zip(jax.tree.leaves(family.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(numpy_dtype).astype(np.float32).view("u4"), np.asarray(b).view("u4"))
    save_policy(again, params, tmp_path / "again", dtype=dtype)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again")]
    assert files[0] == files[1]
