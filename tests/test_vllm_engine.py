"""The embedded sampler and a real vLLM server, float32, same weights: same model, same semantics; and what new weights do."""

import asyncio
import pickle
from dataclasses import replace

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_vllm import Served, needs_vllm, serve_model, shortened

from gspo_jax.policy import load_policy, serving_params
from gspo_jax.pretrained import resolve_model
from gspo_jax.sampler import Sampler
from gspo_jax.scoring import score_tokens
from rollout.types import SamplingParams
from serving_bridge.chat import load_chat
from serving_bridge.publish import PublishError, publish
from serving_bridge.stage import Stage
from serving_bridge.transports import SharedMemory, Stream
from serving_bridge.vllm_client import ServerError, VllmClient

pytestmark = [needs_vllm, pytest.mark.timeout(600)]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROSE = "The quick brown fox jumps over the lazy dog. Paris is the capital of France, and water boils at one hundred degrees."
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = shortened(resolve_model(MODEL), tmp_path_factory.mktemp("model") / "short")
    policy, params = load_policy(str(folder))
    found = serve_model(policy, params, folder, tmp_path_factory.mktemp("vllm"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def chat(served):
    return load_chat(served.policy.folder)


@pytest.fixture(scope="module")
def prose(chat):
    return list(chat.tokenizer.encode(PROSE))


@pytest.fixture(autouse=True)
def weights_of_the_start(served):
    """Each test finds and leaves the weights of the start."""
    yield
    paused = served.run(served.client.get("/is_paused"))["is_paused"]
    if paused or served.gap(served.params, [1, 2, 3, 4]) > 1e-3:
        served.publish(served.params)


def prompts(chat, count: int) -> list[tuple[int, ...]]:
    return [
        tuple(
            chat.encode(
                chat.prompt([{"role": "user", "content": f"What is {i} + {i * 7 % 23}? Explain {i % 5} times."}], None).text
            )
        )
        for i in range(count)
    ]


def moved(params, seed: int, scale: float = 0.02):
    """Other weights of the same model."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda x: x * (1 + scale * jax.random.normal(next(keys), x.shape)), params)


async def everyone(engine, requests):
    return await asyncio.gather(*(engine.sample(ids, params) for ids, params in requests))


def test_greedy_ids_and_log_probabilities_are_the_embedded_samplers(served: Served, chat):
    """50 prompts, same weights, float32 on both sides."""
    requests = [(ids, GREEDY) for ids in prompts(chat, 50)]

    async def embedded():
        sampler = Sampler(served.policy, slots=50, context_length=128, seed=0, decode=chat.decode)
        await sampler.publish(0, served.params)
        try:
            return await everyone(sampler, requests)
        finally:
            await sampler.aclose()

    ours, theirs = asyncio.run(embedded()), served.run(everyone(served.client, requests))
    assert [each.ids for each in ours] == [each.ids for each in theirs]
    gaps = np.abs(np.concatenate([np.subtract(a.logprobs, b.logprobs) for a, b in zip(ours, theirs, strict=True)]))
    assert gaps.max() < 1e-3
    assert {each.versions for each in theirs} <= {(served.version,) * n for n in range(1, 13)}


def filtered(logits: np.ndarray, params: SamplingParams, banned: tuple[int, ...]) -> np.ndarray:
    """log-probabilities of a distribution after temperature, masks, top-k and top-p, from the definitions."""
    scaled = logits.astype(np.float64) / params.temperature
    scaled[list(banned)] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    keep = np.ones(len(order), bool)
    if params.top_k:
        keep[params.top_k :] = False
    p = np.where(keep, np.exp(scaled[order] - scaled.max()), 0)
    p /= p.sum()
    keep &= (np.cumsum(p) - p < params.top_p) | (np.arange(len(p)) == 0)
    out = np.full(len(order), -np.inf)
    kept = order[keep]
    out[kept] = scaled[kept] - (np.log(np.exp(scaled[kept] - scaled.max()).sum()) + scaled.max())
    return out


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.4},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8},
        {"min_tokens": 6, "stop_ids": (2, 28, 30)},
    ],
    ids=str,
)
def test_sampled_log_probabilities_are_those_of_the_distribution_sampled_from(served: Served, chat, change):
    params = replace(SamplingParams(max_tokens=7), **change)
    (prompt,) = prompts(chat, 1)
    found = served.run(everyone(served.client, [(prompt, replace(params, key=(1, i))) for i in range(3)]))
    for completion in found:
        ids = (*prompt, *completion.ids)
        hidden, head = hidden_states(served, ids), np.asarray(served.policy.head(served.params))
        for i, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
            logits = hidden[len(prompt) + i - 1] @ head.T
            banned = params.stop_ids if i < params.min_tokens else ()
            assert abs(filtered(logits, params, banned)[token] - logprob) < 2e-3


def hidden_states(served: Served, ids) -> np.ndarray:
    from gspo_jax.models.layers import Spots

    tokens = jnp.asarray([ids])
    spots = Spots(jnp.arange(len(ids))[None], jnp.ones_like(tokens))
    params = serving_params(served.params, served.policy.dtype)
    return np.asarray(served.policy.model.apply({"params": params}, tokens, spots).hidden[0], np.float32)


def test_a_completion_ends_as_with_the_embedded_sampler(served: Served, chat):
    """Stop ids end it and are part of it, the model's own end id does not unless named, stop strings are matched in text."""
    (prompt,) = prompts(chat, 1)
    free = served.run(served.client.sample(prompt, replace(GREEDY, max_tokens=40)))
    assert free.finish_reason == "length"
    assert len(free.ids) == 40
    at = free.ids[5]
    first = free.ids.index(at)
    stopped = served.run(served.client.sample(prompt, replace(GREEDY, stop_ids=(at,))))
    assert (stopped.ids, stopped.finish_reason) == (free.ids[: first + 1], "stop")
    later = served.run(served.client.sample(prompt, replace(GREEDY, stop_ids=(at,), min_tokens=first + 3)))
    assert len(later.ids) >= first + 3
    word = chat.decode(free.ids[3:5])
    text = served.run(served.client.sample(prompt, replace(GREEDY, stop=(word,))))
    assert text.finish_reason == "stop"
    assert word in chat.decode(text.ids)
    assert word not in chat.decode(text.ids[:-1])


def test_det_03_members_of_a_group_differ_and_a_replay_does_not(served: Served, chat):
    """Replicas, and members, produced the same text: a default seed, or one seed for the group."""
    (prompt,) = prompts(chat, 1)
    requests = [(prompt, SamplingParams(max_tokens=16, key=(0, 3, 1, member, 0))) for member in range(8)]
    once, again = (served.run(everyone(served.client, requests)) for _ in range(2))
    assert len({each.ids for each in once}) == 8
    assert [each.ids for each in once] == [each.ids for each in again]


def test_det_04_bits_depend_on_the_company_and_stay_close(served: Served, chat):
    """Batch composition changes kernels; what is promised is a tolerance. The largest difference is printed per concurrency."""
    requests = [(ids, replace(GREEDY, max_tokens=4)) for ids in prompts(chat, 64)]
    order = np.random.default_rng(0)
    found = {}
    for width in (64, 1, 8, 64, 64):
        places = order.permutation(64)[: 16 if width == 1 else 64]
        done: dict[int, tuple] = {}
        for start in range(0, len(places), width):
            part = places[start : start + width]
            each = served.run(everyone(served.client, [requests[i] for i in part]))
            done |= {int(i): completion for i, completion in zip(part, each, strict=True)}
        for i, completion in done.items():
            alone = found.setdefault(i, completion)
            assert completion.ids == alone.ids
            assert np.abs(np.subtract(completion.logprobs, alone.logprobs)).max() < 1e-3


def test_wsy_10_pushing_the_same_weights_again_changes_nothing(served: Served, chat):
    """Reloads were not idempotent: derived tensors, buffers, one dropped tensor."""
    request = (prompts(chat, 1)[0], replace(GREEDY, max_tokens=20))
    before = served.run(served.client.sample(*request))
    for _ in range(2):
        served.publish(served.params)
        after = served.run(served.client.sample(*request))
        assert after.ids == before.ids
        assert np.abs(np.subtract(after.logprobs, before.logprobs)).max() < 1e-3


def test_new_weights_arrive_whole_by_every_transport(served: Served, prose):
    token = served.token
    stream, delta = Stream(token, "127.0.0.1", delta=False), Stream(token, "127.0.0.1", delta=True)
    try:
        for seed, transport in enumerate([SharedMemory(1), stream, delta, delta]):
            params = moved(served.params, seed)
            assert served.gap(params, prose) > 0.05
            served.publish(params, transport)
            assert served.gap(params, prose) < 1e-3
        # An update of one layer: the rest is not sent again.
        before = sum(each.bytes for each in delta.sender.served.values())
        params = (
            {**params, "norm": jax.tree.map(lambda x: x * 1.05, params["norm"])} if "norm" in params else moved(params, 9, 0)
        )
        served.publish(params, delta)
        assert served.gap(params, prose) < 1e-3
        sent = sum(each.bytes for each in delta.sender.served.values()) - before
        assert 0 < sent < served.stage.write(served.version, served.outgoing.arrays(params)).nbytes / 20
    finally:
        served.run(stream.aclose())
        served.run(delta.aclose())


def test_wsy_09_a_tied_head_follows_its_embedding(served: Served, prose):
    """The embedding was updated and the output head, which shares it, was stale."""
    path = next(name for name in served.params if "embed" in name)
    params = {**served.params, path: jax.tree.map(lambda x: x * 1.1, served.params[path])}
    assert served.gap(params, prose) > 0.05
    served.publish(params)
    assert served.gap(params, prose) < 1e-3


def test_wsy_01_no_prefix_outlives_the_weights_it_was_computed_with(served: Served, prose):
    """The prefix cache is keyed by the prompt's text, not by the weights."""
    prompt = (prose * 10)[:200]

    def cached():
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0}
        body = {"model": "policy", "token_ids": prompt, "sampling_params": params}
        reply = served.run(served.client.call("POST", "/inference/v1/generate", 60.0, json=body))
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["logprobs"]["content"][0]

    cached()
    assert cached()[0] > 100  # the cache is on
    params = moved(served.params, 3, 0.05)
    served.publish(params)
    count, first = cached()
    expected = score_tokens(served.policy, params, np.asarray([[*prompt, first["token_id"]]]))[0, -1]
    assert (count or 0) == 0
    assert abs(first["logprob"] - expected) < 1e-3


def test_in_flight_updates_keep_every_request_and_name_the_version_of_every_token(served: Served, chat):
    """64 requests run while weights are pushed: none is lost, doubled or aborted (WSY-11), versions only grow (WSY-15)."""
    first = served.version
    params = SamplingParams(max_tokens=96, min_tokens=96, stop_ids=(2,))
    requests = [(ids, replace(params, key=(5, i))) for i, ids in enumerate(prompts(chat, 64))]

    async def pushed():
        running = asyncio.gather(*(served.client.sample(*request) for request in requests))
        for seed in range(4):
            await asyncio.sleep(0.8)
            await served.publishing(moved(served.params, seed, 1e-4))
        return await running

    found = served.run(pushed())
    assert [len(each.ids) for each in found] == [96] * 64
    assert {each.finish_reason for each in found} == {"length"}
    assert all(list(each.versions) == sorted(each.versions) for each in found)
    seen = {version for each in found for version in each.versions}
    assert seen <= set(range(first, first + 5))
    assert len(seen) >= 3
    assert max(len(set(each.versions)) for each in found) >= 3
    assert metric(served, "vllm:request_success_total", 'finished_reason="abort"') == 0


def metric(served: Served, name: str, label: str = "") -> float:
    text = served.run(served.client.call("GET", "/metrics", 30.0))
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name) and label in line)


def test_rol_04_who_hangs_up_is_not_generated_for(served: Served, chat):
    """A server kept generating for clients that had gone."""

    async def hang_up():
        params = SamplingParams(max_tokens=400, min_tokens=400, stop_ids=(2,))
        tasks = [asyncio.create_task(served.client.sample(ids, params)) for ids in prompts(chat, 8)]
        await asyncio.sleep(1.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(2.0)

    served.run(hang_up())
    running, drawn = (metric(served, name) for name in ("vllm:num_requests_running", "vllm:generation_tokens_total"))
    assert running == 0
    served.run(asyncio.sleep(1.0))
    assert metric(served, "vllm:generation_tokens_total") == drawn


def test_rol_05_an_idle_connection_is_dropped_by_the_client_first(served: Served):
    """The server closes idle connections after 5 s; a client that keeps them longer meets a closed one."""
    for _ in range(2):
        assert served.run(served.client.version()) == served.version
        served.run(asyncio.sleep(5.5))
    assert served.run(served.client.version()) == served.version


class Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_sec_01_nothing_is_done_for_who_has_no_token_and_nothing_unpickled_for_who_has(served: Served, tmp_path):
    """Anyone who reached the weight-update endpoint could run code."""
    marker, url = tmp_path / "marker", served.server.url
    body = pickle.dumps(Marker(marker))
    admin = ["/pause", "/resume", "/start_weight_update", "/update_weights", "/collective_rpc", "/v1/load_lora_adapter",
             "/reset_prefix_cache", "/inference/v1/generate"]  # fmt: skip
    with httpx.Client(base_url=url, timeout=30) as http:
        for path in admin:
            assert http.post(path, content=body).status_code == 401, path
            assert http.post(path, content=body, headers={"Authorization": "Bearer wrong"}).status_code == 401, path
        assert http.get("/weight_info").status_code == 401
        assert http.get("/health").status_code == 200
        for path in ("/update_weights", "/init_weight_transfer_engine", "/inference/v1/generate"):
            reply = http.post(path, content=body, headers={"Authorization": f"Bearer {served.token}"})
            assert 400 <= reply.status_code < 500, path
    assert not marker.exists()
    assert url.startswith("http://127.0.0.1:")
    assert served.run(served.client.get("/is_paused")) == {"is_paused": False}


@pytest.mark.parametrize("file", ["/etc/passwd", "{shm}/../x.safetensors", "{shm}/0/lock", "/tmp/model.safetensors"])
def test_only_staged_files_are_mapped(served: Served, file):
    info = {"id": "x.1", "file": file.format(shm=served.stage.folder), "count": 1}
    served.run(served.client.post("/start_weight_update"))
    with pytest.raises(ServerError, match=r"under GSPO_VLLM_SHM"):
        served.run(served.client.post("/update_weights", {"update_info": info}))


def test_an_update_that_lacks_a_tensor_is_refused_and_the_next_one_is_whole(served: Served, prose):
    """Half an update must not count towards the next one."""
    params = moved(served.params, 5)
    tensors = served.outgoing.tensors
    lacking = Stage([tensor for tensor in tensors if "layers.3.self_attn.v_proj" not in tensor.name], served.stage.folder)
    try:
        kept = {tensor.name for tensor in lacking.tensors}
        staged = lacking.write(0, ((name, x) for name, x in served.outgoing.arrays(params) if name in kept))
        with pytest.raises(PublishError, match="transfer"):
            served.run(publish(served.client, staged, SharedMemory(), 60.0))
    finally:
        lacking.close()
    served.publish(params)
    assert served.gap(params, prose) < 1e-3


CALLS = ("/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update")


@pytest.mark.parametrize("last", CALLS)
def test_a_publish_that_was_cut_short_anywhere_is_repeated_to_its_end(served: Served, prose, last):
    """The trainer died after the call `last`; the same publish runs again."""
    params = moved(served.params, 10 + CALLS.index(last))
    staged = served.staged(params)
    bodies = {
        "/update_weights": {"update_info": {"id": staged.id, "file": str(staged.path), "count": len(staged.names)}},
        "/finish_weight_update": {"weight_version": staged.id},
    }

    async def cut_short() -> None:
        for path in CALLS[: CALLS.index(last) + 1]:
            await served.client.post(path, bodies.get(path))

    served.run(cut_short())
    served.run(publish(served.client, staged, SharedMemory(), 60.0))
    assert served.run(served.client.get("/is_paused")) == {"is_paused": False}
    assert served.gap(params, prose) < 1e-3
    assert served.run(served.client.version()) == staged.version


def test_another_runs_versions_are_not_ours(served: Served, chat):
    """A server that an earlier run, or somebody else, published to is not taken to have our weights."""

    async def stranger():
        async with VllmClient(served.server.url, "policy", token=served.token, publisher="gspo-other") as client:
            return await client.version(), (await client.sample(prompts(chat, 1)[0], GREEDY)).versions

    assert served.run(stranger()) == (-1, (-1,) * 12)
