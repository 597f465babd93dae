"""Balance of routers as metrics of an update, and the sampler's expert choices replayed by the trainer."""

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_experts import moe_policy
from helpers_model import done, group, micro, random_groups, tiny_policy, turn
from helpers_tokenizer import CHATML, tiny_tokenizer

from gspo_jax.balance import balance, routing_stats
from gspo_jax.batch import Packing, pack, segments_of
from gspo_jax.build import check_routing
from gspo_jax.config import ConfigError, parse_config
from gspo_jax.learner import learner
from gspo_jax.losses import gspo
from gspo_jax.models.experts import Routing
from gspo_jax.models.layers import Spots
from gspo_jax.policy import logprobs_of
from gspo_jax.runlog import read_groups, write_groups
from gspo_jax.sampler import Sampler
from gspo_jax.types import Batch, Mean, Params
from rollout.types import Completion, Group, SamplingParams, Turn
from serving_bridge import trees
from serving_bridge.chat import chat_of
from serving_bridge.gateway import Gateway
from serving_bridge.openai_api import ChatRequest

E, K, ROUTER = 6, 3, "layers/mlp/router/kernel"
NAMES = ("moe/load_max", "moe/load_min", "moe/balance", "moe/router_entropy")


def near_ties(swapped: bool) -> dict[str, Any]:
    """Weights whose experts come in pairs that a router all but confuses, the upper one first; `swapped`: the lower one.

    Three choices take one pair and half of another, so the two routers never choose alike, and hardly differ.
    """
    params = moe_policy(num_experts_per_tok=K)[1]
    kernel = np.array(trees.get(params, ROUTER))
    kernel[..., 1::2] = kernel[..., ::2] + 3e-7 * np.random.default_rng(0).standard_normal(kernel[..., ::2].shape)
    trees.put(params, ROUTER, jnp.asarray(kernel[..., [1, 0, 3, 2, 5, 4]] if swapped else kernel))
    return params


POLICY, CLEAR = moe_policy(num_experts_per_tok=K)
PARAMS, SWAPPED = near_ties(False), near_ties(True)
LEARNER = learner(logprobs_of(POLICY), gspo, optax.sgd(0.0))  # rate 0: every minibatch meets the same router
UPDATE, SCORE = jax.jit(LEARNER.update), jax.jit(logprobs_of(POLICY))
GROUPS = random_groups(0, 3, 4)
ADVANTAGES = [[1.0, -1.0, 0.5, -0.5]] * 3


@cache
def by_hand() -> dict[str, float]:
    """The metrics, from every trajectory run through the model alone."""
    load, p, entropy, tokens = np.zeros((2, E)), np.zeros((2, E)), 0.0, 0
    for each in GROUPS:
        for trajectory in each.trajectories:
            *_, stats = SCORE(CLEAR, micro(pack([group(trajectory)], [[1.0]], 1, Packing(32, 1, "padded"))))
            load += np.asarray(stats["moe/load"].total)
            p += np.asarray(stats["moe/probability"].total)
            entropy += float(jnp.sum(stats["moe/router_entropy"].total))
            tokens += len(trajectory.turns[0].prompt_ids) + len(trajectory.turns[0].completion_ids)
    assert (load.sum(1) == K * tokens).all()
    share = load / (K * tokens)
    values = (E * share.max(), E * share.min(), E * (share * p / tokens).sum(1).mean(), entropy / (2 * tokens))
    return dict(zip(NAMES, map(float, values), strict=True))


def test_balance_is_of_all_tokens_of_the_step_however_they_are_split():
    batch = pack(GROUPS, ADVANTAGES, 6, Packing(32, 2, "padded"))
    assert batch.tokens.shape == (2, 4, 2, 32)  # the fourth micro-batch of each is blank
    _, found = UPDATE(LEARNER.init(CLEAR), batch._replace(experts=np.full((2, 4, 2, 32, 2, K), -1, np.int32)))
    assert {name for name in found if name.startswith("moe/")} == set(NAMES)
    for name, value in by_hand().items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_one_expert_for_all_and_all_experts_alike():
    # One expert of 4 takes all: load 4 and 0, f = p = (1, 0, 0, 0): balance 4, entropy 0. Uniform: 1, 1, 1 and log 4.
    one, even = np.array([8.0, 0, 0, 0]), np.full(4, 2.0)
    for load, entropy, expected in ((one, 0.0, (4, 0, 4, 0)), (even, 8 * np.log(4), (1, 1, 1, np.log(4)))):
        sums = (jnp.asarray(x, jnp.float32) for x in (load[None], load[None], [entropy], [8.0]))
        stats = routing_stats(Routing(jnp.zeros((1, 1, 8, 1), jnp.int32), *sums))
        found = balance(jax.tree.map(lambda x: x[None], stats))
        np.testing.assert_allclose([found[name] for name in NAMES], expected, rtol=1e-6)


def test_a_dense_model_reports_no_balance():
    policy, params = tiny_policy(num_hidden_layers=1)
    batch = micro(pack(GROUPS, ADVANTAGES, 12, Packing(32, 2, "padded")))
    assert len(jax.eval_shape(logprobs_of(policy), params, jax.tree.map(jnp.asarray, batch))) == 2
    assert balance({"policy/loss": Mean(jnp.ones(1), jnp.ones(1))}) == {}


PROMPT = (5, 6, 7, 8)


async def drawn(*requests: tuple[tuple[int, ...], int]) -> list[Completion]:
    sampler = Sampler(POLICY, slots=4, context_length=32, seed=3, record_experts=True)
    await sampler.publish(0, PARAMS)
    params = SamplingParams(max_tokens=9)
    found = [sampler.sample(prompt, replace(params, key=(0, member))) for prompt, member in requests]
    completions = list(await asyncio.gather(*found))
    await sampler.aclose()
    return completions


@pytest.fixture(scope="module")
def sampled() -> list[Completion]:
    """Four completions of one prompt."""
    return asyncio.run(drawn(*((PROMPT, member) for member in range(4))))


def group_of(completions: list[Completion]) -> Group:
    return group(*(
        done(Turn(PROMPT, c.ids, c.logprobs, c.versions, c.finish_reason, experts=c.experts), member=i)
        for i, c in enumerate(completions)
    ))  # fmt: skip


@cache
def forward():
    """`(params, micro-batch) -> ` the routers' choices `[r t l k]`."""

    def run(params: Params, batch: Batch):
        spots = Spots(batch.positions, batch.segment_ids, batch.prefix_ids)
        experts = None if batch.experts is None else jnp.moveaxis(jnp.asarray(batch.experts), 2, 0)
        return jnp.moveaxis(POLICY.model.apply({"params": params}, batch.tokens, spots, None, experts).routing.choices, 0, 2)

    return jax.jit(run)


def test_the_sampler_says_which_experts_each_token_met(sampled):
    for completion in sampled:
        found = np.array(completion.experts)
        assert found.shape == (len(PROMPT) + 9, 2, K)
        assert (found[-1] == -1).all()
        assert ((found[:-1] >= 0) & (found[:-1] < E)).all()
    alone = asyncio.run(drawn((PROMPT, 2)))
    assert alone == sampled[2:3]  # bits, experts included, are the request's own


@pytest.mark.parametrize("mode", ["padded", "shared_prefix"])
def test_replay_gives_the_samplers_routing_and_log_probabilities(sampled, mode):
    batch = micro(pack([group_of(sampled)], [[1.0] * 4], 4, Packing(48, 4, mode)))
    recorded = np.asarray(batch.experts)
    known = recorded >= 0
    processed = 4 * (4 + 8) if mode == "padded" else 4 + 4 * 8
    assert known.all((2, 3)).sum() == known.any((2, 3)).sum() == processed
    np.testing.assert_array_equal(np.asarray(forward()(SWAPPED, batch))[known], recorded[known])
    mask = np.asarray(batch.loss_mask)
    np.testing.assert_allclose(np.asarray(SCORE(SWAPPED, batch)[0])[mask], batch.behavior_logprobs[mask], atol=1e-5)
    free = batch._replace(experts=np.full_like(np.asarray(batch.experts), -1))
    assert (np.asarray(forward()(SWAPPED, free)) != recorded)[known].any()
    assert np.abs(np.asarray(SCORE(SWAPPED, free)[0])[mask] - batch.behavior_logprobs[mask]).max() > 1e-2
    np.testing.assert_array_equal(SCORE(SWAPPED, free)[0], SCORE(SWAPPED, batch._replace(experts=None))[0])


def test_an_update_replays_in_both_passes(sampled):
    # Two minibatches: the proximal pass scores the second, the update both; the gap is to what the sampler recorded.
    batch = pack([group_of(sampled)], [[1.0, -1.0, 2.0, -2.0]], 2, Packing(32, 2, "shared_prefix"))
    batch = jax.tree.map(lambda x: np.concatenate([x] + [np.zeros_like(x)] * 3, 1), batch)  # the shape compiled above
    assert batch.tokens.shape == (2, 4, 2, 32)
    _, found = UPDATE(LEARNER.init(SWAPPED), batch)
    assert found["mismatch/max"] < 1e-5
    assert found["drift/logprob_abs"] < 1e-5
    assert found["optimizer/grad_norm"] > 0
    free = batch._replace(experts=np.full_like(np.asarray(batch.experts), -1))
    assert UPDATE(LEARNER.init(SWAPPED), free)[1]["mismatch/max"] > 1e-2


def test_a_later_turn_adds_the_experts_of_its_own_tokens():
    def chosen(base: int, size: int):
        return (*(((base + i,),) for i in range(size - 1)), ((-1,),))

    first = replace(turn([1, 2], [3, 4]), experts=chosen(10, 4))
    second = replace(turn([1, 2, 3, 4, 5], [6, 7]), experts=chosen(20, 7))
    both = (((10,),), ((11,),), ((12,),), ((23,),), ((24,),), ((25,),), None)  # token 3 was processed by the second turn only
    (segment,) = segments_of(done(first, second), 1.0, 1)
    assert segment.experts == both
    (segment,) = segments_of(done(first, replace(second, experts=None)), 1.0, 1)
    assert segment.experts == (*both[:3], None, None, None, None)
    (segment,) = segments_of(done(replace(first, experts=None), second), 1.0, 1)
    assert segment.experts == (*(((20 + i,),) for i in range(6)), None)
    with pytest.raises(ValueError, match="experts of 3 tokens for a turn of 4"):
        segments_of(done(replace(first, experts=chosen(0, 3))), 1.0, 1)
    assert pack([group(done(turn([1], [2])))], [[1.0]], 1, Packing(8)).experts is None


def test_choices_survive_the_run_log(sampled, tmp_path):
    mixed = (group_of(sampled), group(done(turn([1], [2, 3]))))
    write_groups(tmp_path / "log.jsonl", mixed)
    assert read_groups(tmp_path / "log.jsonl") == mixed


def test_the_gateway_records_what_the_engine_chose():
    chat = chat_of(tiny_tokenizer(CHATML))

    async def engine(prompt_ids, params):
        return Completion((4, 2), (-0.5, -0.5), (0, 0), "stop", experts=(((1,),),) * (len(prompt_ids) + 1) + (((-1,),),))

    gateway = Gateway(engine, chat, model="tiny", context_length=99, timeout_s=9.0, base_url="http://localhost")
    trace, _ = gateway.open(SamplingParams(max_tokens=4))
    asyncio.run(gateway.traced_chat(trace, ChatRequest.model_validate({"messages": [{"role": "user", "content": "4"}]})))
    (recorded,) = gateway.close(trace)
    assert recorded.experts is not None
    assert len(recorded.experts) == len(recorded.prompt_ids) + 2


def test_a_dense_model_cannot_replay():
    sections = {
        "model": {"base": "x"},
        "services": {"task_url": "http://h"},
        "rollout": {"episodes_per_batch": 8},
        "training": {"learning_rate": 1e-3, "iterations_per_epoch": 1, "group_size": 4},
    }
    config, _ = parse_config(sections, ["algorithm.routing_replay=sampler"])
    check_routing(config, POLICY)
    with pytest.raises(ConfigError, match=r'algorithm.routing_replay: "sampler" needs a mixture of experts, and llama'):
        check_routing(config, tiny_policy()[0])
    check_routing(parse_config(sections, [])[0], tiny_policy()[0])
