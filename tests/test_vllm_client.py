"""The client of one vLLM server: what it asks, what it takes for an answer, and what it says when it gets none."""

import asyncio
import contextlib
import copy
import json
import math
import os
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from fake_vllm import BASE, FakeVllm, score

from rollout.server import serve
from rollout.types import Completion, SamplingParams
from serving_bridge import vllm_http
from serving_bridge.capabilities import Needs, problems
from serving_bridge.plugin.gspo_vllm.guard import TOKEN, AdminToken
from serving_bridge.vllm_client import ServerError, VllmClient, read_completion, request_seed, sampling_body, version_number

PUBLISHER = "gspo-0123"
SECRET = "a-token-nobody-should-see"
PARAMS = SamplingParams(max_tokens=5, key=(1, 2, 3, 4))


@contextlib.asynccontextmanager
async def served(app=None, **options):
    """`(fake, client)`; `app` stands before the fake if it is given."""
    fake = FakeVllm()
    async with (
        await serve(app(fake) if app else fake) as server,
        VllmClient(server.url, "policy", **({"publisher": PUBLISHER, "timeout_s": 5.0} | options)) as client,
    ):
        yield fake, client
        fake.close()


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


async def error_of(work) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await work
    return caught.value


# what it asks


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(max_tokens=9), {"max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 77}),
        (SamplingParams(max_tokens=9, temperature=0.0), {"temperature": 0.0, "seed": None}),
        (SamplingParams(max_tokens=9, temperature=0.3, top_p=0.8, top_k=40), {"temperature": 0.3, "top_p": 0.8, "top_k": 40}),
        (SamplingParams(max_tokens=9, stop_ids=(5, 6)), {"stop_token_ids": [5, 6], "detokenize": False, "stop": None}),
        (SamplingParams(max_tokens=9, stop=("</s>",)), {"stop": ["</s>"], "detokenize": True}),
        (SamplingParams(max_tokens=9, min_tokens=4), {"min_tokens": 4}),
        (SamplingParams(max_tokens=9, min_tokens=20), {"min_tokens": 9}),  # vLLM refuses more than max_tokens
    ],
)
def test_sampling_parameters_are_spelled_as_vllm_does(params, expected):
    """Whatever else vLLM would do by itself is switched off: end ids, text, hidden special tokens."""
    body = sampling_body(params, 77)
    assert {name: body.get(name) for name in expected} == expected
    fixed = {"n": 1, "logprobs": 0, "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert {name: body[name] for name in fixed} == fixed


def test_a_completion_is_asked_for_and_read():
    async def work():
        async with served() as (fake, client):
            fake.version = f"{PUBLISHER}.3"
            completion = await client.sample((4, 5, 6), PARAMS)
            (path, body), (done,) = fake.bodies[-1], fake.finished
            assert path == "/inference/v1/generate"
            seed = request_seed(0, PARAMS.key)
            assert body == {"model": "policy", "token_ids": [4, 5, 6], "sampling_params": sampling_body(PARAMS, seed)}
            ids, logprobs = zip(*done.tokens, strict=True)
            assert completion == Completion(ids, logprobs, (3,) * 5, "length")

    run(work())


def test_wsy_15_every_token_keeps_the_version_that_sampled_it():
    """A single label would say of all tokens what is true of the first."""

    async def work():
        async with served() as (fake, client):
            fake.version, fake.token_s = f"{PUBLISHER}.3", 0.01
            task = asyncio.create_task(client.sample((1,), replace(PARAMS, max_tokens=40)))
            for version, place in ((4, 10), (9, 25)):
                while not fake.running or len(fake.running[0].tokens) < place:
                    await asyncio.sleep(0.002)
                fake.version = f"{PUBLISHER}.{version}"
            completion = await task
            assert completion.versions == tuple(version_number(each, PUBLISHER) for each in fake.finished[0].versions)
            assert sorted(set(completion.versions)) == [3, 4, 9]
            assert list(completion.versions) == sorted(completion.versions)

    run(work())


@pytest.mark.parametrize(
    ("name", "version"),
    [(f"{PUBLISHER}.0", 0), (f"{PUBLISHER}.17", 17), ("default", -1), (f"{PUBLISHER}.", -1), (f"{PUBLISHER}.-1", -1),
     ("gspo-other.17", -1), ("17", -1), (f"{PUBLISHER}.1.7", -1), (f"{PUBLISHER}.²", -1), (f"{PUBLISHER}.٣", -1),
     (f"x{PUBLISHER}.7", -1), (None, -1), (7, -1)],
)  # fmt: skip
def test_versions_of_others_are_not_ours(name, version):
    assert version_number(name, PUBLISHER) == version
    assert version_number(name, "") == -1


def test_det_03_seeds_are_a_function_of_the_runs_seed_and_the_key_alone():
    """Members of a group, steps, prompts, turns and runs differ; a replay, and another server, do not."""
    keys = [(step, group, member, turn) for step in range(5) for group in range(5) for member in range(8) for turn in range(3)]
    seeds = {(seed, key): request_seed(seed, key) for seed in (0, 1) for key in keys}
    assert len(set(seeds.values())) == 2 * len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds.values())  # what vLLM's generators take
    assert seeds == {(seed, key): request_seed(seed, list(key)) for seed, key in seeds}
    assert request_seed(1, (2, 3)) != request_seed(12, (3,)) != request_seed(1, (23,))

    async def sampled(seed, members):
        async with served(seed=seed) as (_, client):
            params = [replace(PARAMS, key=(0, 3, member, 0)) for member in members]
            return [each.ids for each in await asyncio.gather(*(client.sample((7, 8), each) for each in params))]

    first, again, other = run(sampled(3, range(8))), run(sampled(3, reversed(range(8)))), run(sampled(4, range(8)))
    assert len(set(first)) == 8
    assert again == first[::-1]
    assert not set(first) & set(other)


def test_a_probe_is_scored_at_every_place():
    async def work():
        async with served() as (fake, client):
            ids = list(range(50, 70))
            assert await client.probe(ids) == pytest.approx(score(BASE, ids), abs=0)
            assert fake.bodies[-1][1]["sampling_params"]["temperature"] == 0.0
            fake.weights = 12345
            assert await client.probe(ids) == pytest.approx(score(12345, ids), abs=0)

    run(work())


@pytest.mark.parametrize(
    "reply",
    [{}, [], "text", {"prompt_logprobs": None}, {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]},
     {"prompt_logprobs": [None, {"5": {}}]}, {"prompt_logprobs": [None, {"5": {"logprob": "x"}}]},
     {"prompt_logprobs": [None, {"5": {"logprob": -1.0}}, {"5": {"logprob": -1.0}}]}, {"prompt_logprobs": [None, None]}],
    ids=json.dumps,
)  # fmt: skip
def test_a_probe_that_is_not_answered_is_an_error(reply):
    async def work():
        async with served() as (fake, client):
            fake.faults["/inference/v1/generate"].append(lambda: reply)
            error = await error_of(client.probe([4, 5]))
            assert "no log-probabilities of a prompt in its reply" in str(error)
            assert client.url in str(error)

    run(work())


# what it takes for an answer

GOOD: dict[str, Any] = {
    "choices": [{
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in (5, 6, 7)]},
        "finish_reason": "stop",
        "weight_versions": [{"version": f"{PUBLISHER}.2", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 3}],
    }]
}  # fmt: skip
MISSING = object()


def changed(*path, to=MISSING):
    """GOOD with one place changed, or missing."""
    reply = copy.deepcopy(GOOD)
    *outer, last = path
    place: Any = reply
    for key in outer:
        place = place[key]
    if to is MISSING:
        del place[last]
    else:
        place[last] = to
    return reply


def test_a_whole_reply_is_read():
    assert read_completion(GOOD, "x", PUBLISHER) == Completion((5, 6, 7), (-0.5,) * 3, (2, -1, -1), "stop")


CHOICE = ("choices", 0)
CONTENT = (*CHOICE, "logprobs", "content")
SPANS = (*CHOICE, "weight_versions")
MALFORMED = {
    "no object": ["x"],
    "text": "<html>",
    "nothing": None,
    "no choices": changed("choices"),
    "two choices": changed("choices", to=GOOD["choices"] * 2),
    "no choice": changed("choices", to=[]),
    "choice is text": changed("choices", to=["x"]),
    "no ids": changed(*CHOICE, "token_ids"),
    "ids are none": changed(*CHOICE, "token_ids", to=None),
    "an id is text": changed(*CHOICE, "token_ids", 1, to="x"),
    "an id is infinite": changed(*CHOICE, "token_ids", 1, to=math.inf),
    "no logprobs": changed(*CHOICE, "logprobs", to=None),
    "no content": changed(*CONTENT, to=None),
    "a content is none": changed(*CONTENT, 1, to=None),
    "a content has no id": changed(*CONTENT, 1, "token_id"),
    "a content has no logprob": changed(*CONTENT, 1, "logprob"),
    "a logprob is none": changed(*CONTENT, 1, "logprob", to=None),
    "no spans": changed(*SPANS, to=None),
    "spans are missing": changed(*SPANS),
    "a span without version": changed(*SPANS, 0, "version"),
    "a gap between spans": changed(*SPANS, 1, "start", to=2),
    "overlapping spans": changed(*SPANS, 1, "start", to=0),
    "spans too short": changed(*SPANS, 1, "end", to=2),
    "spans too long": changed(*SPANS, 1, "end", to=4),
    "a span of many": changed(*SPANS, 1, "end", to=10**15),
    "a span backwards": changed(*SPANS, 0, "end", to=-1),
    "no finish reason": changed(*CHOICE, "finish_reason"),
}
WRONG = {
    "fewer logprobs": changed(*CONTENT, to=GOOD["choices"][0]["logprobs"]["content"][:2]),
    "logprobs of others": changed(*CONTENT, 1, "token_id", to=9),
    "empty": changed(*CHOICE, to=GOOD["choices"][0] | {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []}),
    "not a number": changed(*CONTENT, 1, "logprob", to=math.nan),
    "vLLM's not a number": changed(*CONTENT, 1, "logprob", to=-9999.0),
    "plus infinity": changed(*CONTENT, 1, "logprob", to=math.inf),
    "minus infinity": changed(*CONTENT, 1, "logprob", to=-math.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_reply_that_is_no_completion_is_an_error(name):
    with pytest.raises(ServerError, match=r"^http://x: not a completion with log-probabilities and versions") as caught:
        read_completion(MALFORMED[name], "http://x", PUBLISHER)
    assert not caught.value.gone
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", WRONG)
def test_a_completion_that_cannot_be_trained_on_is_an_error(name):
    with pytest.raises(ServerError, match=r"log-probabilities of . that are not those|that is not a number") as caught:
        read_completion(WRONG[name], "http://x", PUBLISHER)
    assert not caught.value.gone


def test_wsy_11_a_completion_that_the_server_broke_off_is_sampled_again_and_not_trained_on():
    for reason in ("abort", "error", None):
        with pytest.raises(ServerError, match=f"ended by the server .{reason}") as caught:
            read_completion(changed(*CHOICE, "finish_reason", to=reason), "x", PUBLISHER)
        assert caught.value.gone  # the request may be repeated


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[1]", b"null", b"NaN", b'{"choices": {}}'])
def test_bytes_that_are_no_completion_are_an_error(body):
    """Over the wire: not JSON, not UTF-8, no object."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def work():
        async with served(lambda _: app) as (_, client):
            assert "not a completion" in str(await error_of(client.sample((1,), PARAMS)))
            if not body.startswith(b'{"'):
                assert "which is no JSON object" in str(await error_of(client.version()))

    run(work())


# what it says when it gets none


@pytest.mark.parametrize("status", [307, 400, 401, 404, 429, 500, 503])
def test_statuses(status):
    async def work():
        async with served() as (fake, client):
            fake.faults["/pause"].append(status)
            error = await error_of(client.post("/pause", mode="keep"))
            assert str(error) == f"POST {client.url}/pause answered {status}: scripted {status}"
            assert (error.status, error.gone) == (status, status >= 500)

    run(work())


def test_wsy_07_whatever_never_answers_is_named_within_its_deadline():
    async def work():
        async with served(timeout_s=0.3) as (fake, client):
            for path, call in {
                "/inference/v1/generate": lambda: client.sample((1,), PARAMS),
                "/update_weights": lambda: client.post("/update_weights", {}, timeout_s=0.3),
            }.items():
                fake.faults[path].append("hang")
                started = time.monotonic()
                error = await error_of(call())
                assert time.monotonic() - started < 2.0
                assert str(error) == f"POST {client.url}{path}: no answer within 0.3 s"
                assert (error.gone, error.status) == (True, None)

    run(work())


def test_an_answer_that_drips_is_bounded_as_a_whole():
    """Each byte comes before a read would time out; the deadline is that of the exchange."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(OSError):
            for _ in range(100):
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": b""})

    async def work():
        async with served(lambda _: app, timeout_s=0.4) as (_, client):
            started = time.monotonic()
            assert "no answer within 0.4 s" in str(await error_of(client.sample((1,), PARAMS)))
            assert time.monotonic() - started < 2.0

    run(work())


def test_a_lost_connection_and_a_refused_one_are_gone():
    async def work():
        async with served() as (fake, client):
            fake.faults["/weight_info"].append("drop")
            error = await error_of(client.version())
            assert (error.gone, error.status) == (True, None)
            assert str(error).startswith(f"GET {client.url}/weight_info: RemoteProtocolError: ")
            assert await client.version() == -1
        async with VllmClient(client.url, "policy") as late:
            error = await error_of(late.version())
            assert (error.gone, error.status) == (True, None)
            assert str(error).startswith(f"GET {client.url}/weight_info: ConnectError: ")

    run(work())


def test_closing_ends_what_is_in_flight_and_what_is_asked_later():
    """Requests to a server that is given up must move on at once, not at their deadline."""

    async def work():
        async with served(timeout_s=20.0) as (fake, client):
            fake.paused = True
            fake.going.clear()
            tasks = [asyncio.create_task(client.sample((i,), PARAMS)) for i in range(20)]
            while len(fake.running) < 20:
                await asyncio.sleep(0.01)
            started = time.monotonic()
            await client.aclose()
            errors = [await error_of(task) for task in tasks]
            assert all(error.gone for error in errors)
            assert "closed from this side" in str(await error_of(client.version()))
            while fake.running:  # and the server stops computing for them (ROL-04)
                await asyncio.sleep(0.01)
            assert time.monotonic() - started < 5.0
            assert fake.hung_up == 20

    run(work())


def test_rol_04_a_cancelled_request_closes_its_connection():
    async def work():
        async with served() as (fake, client):
            tasks = [asyncio.create_task(client.sample((i,), replace(PARAMS, max_tokens=10**6))) for i in range(8)]
            while len(fake.running) < 8:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            started = time.monotonic()
            while fake.running:
                await asyncio.sleep(0.01)
            assert time.monotonic() - started < 2.0
            assert (fake.hung_up, fake.finished) == (8, [])

    run(work())


@pytest.mark.parametrize("close", [False, True], ids=["cancelled", "closed"])
def test_a_call_that_is_cut_off_leaves_no_connection_open(monkeypatch, close):
    """httpx drops idle connections when the next call begins; cut off while it does, it forgot those that were left."""
    monkeypatch.setattr(vllm_http, "KEEP_ALIVE_S", 0.05)

    async def work():
        before = sockets()
        for moment in range(0, 20, 2):
            async with served() as (_, client):
                await asyncio.gather(*(client.sample((i,), PARAMS) for i in range(10)))
                await asyncio.sleep(0.06)
                task = asyncio.create_task(client.version())
                for _ in range(moment):
                    await asyncio.sleep(0)
                await client.aclose() if close else task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        assert sockets() == before

    run(work())


def sockets():
    links = (f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.islink(link) and os.readlink(link).startswith("socket:")}


def test_rol_05_idle_connections_are_dropped_by_the_client_first(monkeypatch):
    """vLLM closes them after 5 s; here all is ten times faster. A kept one would meet a closed socket now and then."""
    assert vllm_http.KEEP_ALIVE_S < 5.0
    monkeypatch.setattr(vllm_http, "KEEP_ALIVE_S", vllm_http.KEEP_ALIVE_S / 10)
    accepted = []

    async def connection(reader, writer):
        accepted.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            while True:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.5)
                body = b'{"weight_version": "default"}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def work():
        async with await asyncio.start_server(connection, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with VllmClient(f"http://{host}:{port}", "policy") as client:
                for pause in (0.0, 0.0, 0.4, 0.45, 0.49, 0.5, 0.51):
                    await asyncio.sleep(pause)
                    assert await client.version() == -1
        assert len(accepted) >= 6  # after each pause a fresh one

    run(work())


def test_requests_in_flight_cannot_keep_an_admin_call_waiting():
    """A pause that waited for a free connection would wait for requests that wait for the pause to end."""

    async def work():
        async with served(concurrency=2) as (fake, client):
            await client.post("/pause", mode="keep")
            tasks = [asyncio.create_task(client.sample((i,), PARAMS)) for i in range(40)]
            while len(fake.running) < 40:
                await asyncio.sleep(0.01)
            await client.post("/resume", timeout_s=2.0)
            assert len(await asyncio.gather(*tasks)) == 40

    run(work())


# secrets


def test_sec_01_the_token_goes_with_every_call_and_into_no_message(monkeypatch):
    """Not even when the server repeats it, as some do when they refuse a header."""

    async def echo(scope, receive, send):
        said = dict(scope["headers"]).get(b"authorization", b"").decode()
        status = {"/health": 200, "/is_sleeping": 200}.get(scope["path"], 401)
        body = json.dumps({"error": {"message": f"bad header {said}"}} if status == 401 else said).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def work():
        async with served(lambda _: echo, token=SECRET) as (_, client):
            assert await client.get("/health") == f"Bearer {SECRET}"
            for call in (client.version(), client.sample((1,), PARAMS), client.probe([1, 2]), client.idle()):
                error = await error_of(call)
                assert SECRET not in f"{error} {error!r} {error.args} {error.__cause__!r} {vars(error)}"
                assert "***" in str(error)
            assert SECRET not in f"{client!r} {client.url}"
        monkeypatch.setenv(TOKEN, SECRET)
        async with served(AdminToken, token="another") as (_, client):
            error = await error_of(client.version())
            assert (error.status, error.gone) == (401, False)
            assert await problems(client, Needs(64, "float32", "gspo")) == [
                "it refuses the token: serving.token_env must name the variable that holds its GSPO_VLLM_TOKEN"
            ]
        async with served(AdminToken, token=SECRET) as (_, client):
            assert await client.version() == -1

    run(work())


@pytest.mark.parametrize("token", ["a\r\nx: y", "tök", "a\n"])
def test_a_token_that_cannot_be_sent_is_refused_without_showing_it(token):
    """An HTTP library names the header that it cannot send."""
    with pytest.raises(ValueError, match=r"serving\.token_env") as caught:
        VllmClient("http://127.0.0.1:1", "policy", token=token)
    assert token not in str(caught.value)


def test_a_login_in_a_url_is_used_and_not_shown():
    async def work():
        async with served() as (fake, client):
            url = client.url.replace("//", f"//me:{SECRET}@")
            async with VllmClient(f"{url}/", "policy") as other:
                assert await other.version() == -1
                assert other.url == client.url
                assert fake.headers[-1]["authorization"].startswith("Basic ")
                fake.faults["/pause"].append(500)
                assert SECRET not in str(await error_of(other.post("/pause")))

    run(work())


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def work():
        async with served() as (_, client):
            assert await client.version() == -1

    run(work())


def test_redirects_are_not_followed():
    """The token would go along."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 307, "headers": [(b"location", b"http://127.0.0.1:1/x")]})
        await send({"type": "http.response.body", "body": b""})

    async def work():
        async with served(lambda _: app) as (_, client):
            error = await error_of(client.version())
            assert (error.status, error.gone) == (307, False)

    run(work())


# what stands against training with a server

NEEDS = Needs(512, "float32", "gspo", 0)
ADAPTERS = Needs(512, "float32", "", 16)


def test_a_server_without_fault_has_no_problems():
    async def work():
        async with served() as (_, client):
            assert await problems(client, NEEDS) == []
            assert await problems(client, ADAPTERS) == []

    run(work())


DESERVED = {
    "raw": ("model_config", "logprobs_mode", "raw_logprobs", NEEDS, "raw_logprobs.*--logprobs-mode processed_logprobs"),
    "short": ("model_config", "max_model_len", 511, NEEDS, "takes 511 tokens.*--max-model-len 512.*serving.context_length"),
    "no length": ("model_config", "max_model_len", None, NEEDS, "takes 0 tokens.*--max-model-len 512"),
    "dtype": ("model_config", "dtype", "torch.bfloat16", NEEDS, "computes in bfloat16.*--dtype float32.*serving.dtype"),
    "quantized": ("model_config", "quantization", "fp8", NEEDS, r"quantized \(fp8\).*without --quantization"),
    "drafts": ("", "speculative_config", {"method": "ngram"}, NEEDS, "speculatively.*without --speculative-config"),
    "overrides": ("model_config", "override_generation_config", {"top_k": 1}, NEEDS, "--override-generation-config"),
    "processors": ("model_config", "logits_processors", ["x"], NEEDS, "--logits-processors"),
    "chunks": ("scheduler_config", "enable_chunked_prefill", True, NEEDS,
               "CPU Generator.*--no-enable-chunked-prefill --max-num-batched-tokens 8192"),
    "long chunks": ("scheduler_config", "enable_chunked_prefill", True, Needs(9000, "float32", "gspo"),
                    "--max-num-batched-tokens 9000"),
    "no transfer": ("", "weight_transfer_config", None, NEEDS,
                    "transfer is off.*--weight-transfer-config '{\"backend\": \"gspo\"}'"),
    "transfer": ("weight_transfer_config", "backend", "nccl", NEEDS, "transfer is nccl.*--weight-transfer-config"),
    "lor_05 rank": ("lora_config", "max_lora_rank", 8, ADAPTERS,
                    "up to rank 8, training.lora.r is 16.*--enable-lora --max-lora-rank 16"),
    "lor_05 none": ("", "lora_config", None, ADAPTERS, "up to rank 0, training.lora.r is 16.*--enable-lora"),
    "lor_08 sleep": ("model_config", "enable_sleep_mode", True, ADAPTERS,
                     "asleep it loses weights.*without --enable-sleep-mode"),
}  # fmt: skip


@pytest.mark.parametrize("name", DESERVED)
def test_each_problem_is_said_with_the_flag_to_set(name):
    section, key, value, needs, pattern = DESERVED[name]

    async def work():
        async with served() as (fake, client):
            if needs.context_length > 512:
                fake.config["model_config"]["max_model_len"] = needs.context_length
            (fake.config[section] if section else fake.config)[key] = value
            (found,) = await problems(client, needs)
            assert "\n" not in found
            assert re.search(pattern, found)

    run(work())


def test_chunked_prefill_is_no_problem_on_a_gpu():
    async def work():
        async with served() as (fake, client):
            fake.config["scheduler_config"]["enable_chunked_prefill"] = True
            fake.config["device_config"] = {"device": "cuda", "device_type": "cuda"}
            assert await problems(client, NEEDS) == []

    run(work())


def test_sleep_mode_is_no_problem_where_all_weights_are_sent():
    async def work():
        async with served() as (fake, client):
            fake.config["model_config"]["enable_sleep_mode"] = True
            assert await problems(client, NEEDS) == []

    run(work())


@pytest.mark.parametrize(
    ("lacking", "needs", "pattern"),
    [
        ("/inference/v1/generate", NEEDS, "--enable-scale-out"),
        ("/update_weights", NEEDS, "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/load_lora_adapter", ADAPTERS, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ],
)
def test_a_route_that_lacks_is_said_with_what_brings_it(lacking, needs, pattern):
    async def work():
        async with served() as (fake, client):
            routes = ("/inference/v1/generate", "/update_weights", "/v1/load_lora_adapter")
            paths = {path: {} for path in routes if path != lacking}
            fake.faults["/openapi.json"].append(lambda: {"paths": paths})
            (found,) = await problems(client, needs)
            assert pattern in found

    run(work())


def test_a_server_without_the_plugin_is_told_how_to_get_it():
    async def work():
        async with served() as (fake, client):
            fake.faults["/gspo_vllm"].append(404)
            (found,) = await problems(client, NEEDS)
            assert "--middleware gspo_vllm.guard.AdminToken" in found
            assert "serving_bridge/plugin" in found

    run(work())


def test_servers_that_are_not_such_a_vllm():
    async def work():
        async with served() as (fake, client):
            for answer, expected in ((404, "VLLM_SERVER_DEV_MODE=1"), (lambda: {"vllm_config": "text"}, "vLLM 0.32 or newer"),
                                     (list, "vLLM 0.32 or newer")):  # fmt: skip
                fake.faults["/server_info"].append(answer)
                (found,) = await problems(client, NEEDS)
                assert expected in found
            fake.faults["/server_info"].append(500)
            assert (await error_of(problems(client, NEEDS))).status == 500

    run(work())


def test_all_problems_are_said_at_once():
    async def work():
        async with served() as (fake, client):
            fake.config = {}
            fake.faults["/openapi.json"].append(list)
            found = await problems(client, replace(NEEDS, lora_rank=4))
            assert len(found) == len(set(found)) == 8

    run(work())
