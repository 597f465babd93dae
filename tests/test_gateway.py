"""The gateway over real HTTP, in front of a scripted engine."""

import asyncio
import contextlib
import itertools
import json
import random
import re

import httpx
import pytest
from helpers_tokenizer import CHATML, OPENS_REASONING, TOOLS_CHATML, tiny_tokenizer

from rollout.server import serve
from rollout.types import Completion, FinishReason, SamplingParams
from serving_bridge.chat import chat_of
from serving_bridge.gateway import Gateway, build_gateway_app

USER = {"role": "user", "content": "What is nine minus five?"}
END = 2
NAN, INF = float("nan"), float("inf")


class Engine:
    """Answers with the completions it was given, in order, and keeps what it was asked."""

    def __init__(self, *completions):
        self.completions, self.calls, self.cancelled = list(completions), [], 0
        self.release = asyncio.Event()
        self.release.set()

    async def __call__(self, prompt_ids, params):
        self.calls.append((tuple(prompt_ids), params))
        completion = self.completions[min(len(self.calls), len(self.completions)) - 1]
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(completion, Exception):
            raise completion
        return completion


def completion(ids, finish_reason: FinishReason = "stop", version=7):
    return Completion(tuple(ids), tuple(-0.25 * (i + 1) for i in range(len(ids))), (version,) * len(ids), finish_reason)


@contextlib.asynccontextmanager
async def served(engine, template=CHATML, *, context_length=400, timeout_s=10.0):
    """`(gateway, chat, client)` with the app on a loopback socket; the client's base URL is the app's."""
    chat = chat_of(tiny_tokenizer(template))
    gateway = Gateway(engine, chat, model="tiny", context_length=context_length, timeout_s=timeout_s)
    async with await serve(build_gateway_app(gateway)) as server:
        gateway.base_url = server.url
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            yield gateway, chat, client


def tokens(text, template=CHATML):
    return chat_of(tiny_tokenizer(template)).encode(text)


def answer(text="4", **options):
    return completion((*tokens(text), END), **options)


SAMPLING = SamplingParams(max_tokens=50, temperature=0.7, key=(3, 1, 4))


def error_of(response):
    return response.status_code, response.json()["error"]["code"]


def test_a_turn_is_recorded_as_sampled_and_shown_in_openai_form():
    engine = Engine(answer("4"))

    async def run():
        async with served(engine) as (gateway, chat, client):
            trace_id, url = gateway.open(SAMPLING)
            reply = (await client.post(url, json={"messages": [USER]})).json()
            return chat, trace_id, url, reply, gateway.close(trace_id)

    chat, trace_id, url, reply, (turn,) = asyncio.run(run())
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/t/{trace_id}/v1/chat/completions\?cid={trace_id}", url)
    assert re.fullmatch("trace_[0-9a-f]{32}", trace_id)
    sampled = answer("4")
    assert (turn.prompt_ids, turn.completion_ids) == (chat.render([USER]), sampled.ids)
    assert (turn.logprobs, turn.versions, turn.finish_reason) == (sampled.logprobs, sampled.versions, "stop")
    assert turn.messages == (USER, {"role": "assistant", "content": "4"})
    (choice,) = reply["choices"]
    assert reply["object"] == "chat.completion"
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop", "logprobs": None}
    prompt, made = len(turn.prompt_ids), len(sampled.ids)
    assert reply["usage"] == {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def test_the_trainer_governs_sampling_and_the_body_may_only_lower_max_tokens():
    engine = Engine(answer())
    bodies = [
        {"temperature": 1.9, "top_p": 0.1, "top_k": 3, "stop": "x", "seed": 5},
        {"max_tokens": 9},
        {"max_completion_tokens": 8, "max_tokens": 12},
        {"max_tokens": 5000},
    ]

    async def run():
        async with served(engine) as (gateway, _, client):
            trace_id, url = gateway.open(SamplingParams(50, temperature=0.7, stop=("</a>",), stop_ids=(9,), key=(3, 1, 4)))
            for body in bodies:
                assert (await client.post(url, json={"messages": [USER], **body})).status_code == 200
            gateway.close(trace_id)

    asyncio.run(run())
    asked = [params for _, params in engine.calls]
    assert [params.max_tokens for params in asked] == [50, 9, 8, 50]
    assert [params.key for params in asked] == [(3, 1, 4, turn) for turn in range(4)]
    assert {(p.temperature, p.top_p, p.top_k, p.stop, p.stop_ids) for p in asked} == {(0.7, 1.0, 0, ("</a>",), (END, 9))}


def test_tok_01_recorded_prompts_extend_what_was_sampled_over_three_turns():
    """Each turn was decoded to text and tokenised again, and training saw ids the policy never sampled."""
    draw, chat = random.Random(1), chat_of(tiny_tokenizer())
    ordinary = range(4, len(chat.tokenizer))
    engine = Engine(*(completion((*draw.choices(ordinary, k=draw.randrange(1, 12)), END)) for _ in range(300)))

    async def episode(gateway, client):
        trace_id, url = gateway.open(SAMPLING)
        messages = [USER]
        for _ in range(3):
            reply = (await client.post(url, json={"messages": messages})).json()
            messages = [*messages, reply["choices"][0]["message"], {"role": "user", "content": "and now?"}]
        return gateway.close(trace_id)

    async def run():
        async with served(engine) as (gateway, _, client):
            return [await episode(gateway, client) for _ in range(100)]

    unusual = 0
    for turns in asyncio.run(run()):
        for turn, later in itertools.pairwise(turns):
            exact = turn.prompt_ids + turn.completion_ids
            assert later.prompt_ids[: len(exact)] == exact
        unusual += sum(chat.encode(chat.decode(turn.completion_ids)) != turn.completion_ids for turn in turns)
    assert unusual > 200


def test_tok_13_the_finish_reason_is_the_engines():
    """Truncation was guessed from the last id, though the model ends with another end token than the tokenizer's."""
    tokenizer = tiny_tokenizer()
    engine = Engine(completion((*tokens("4"), 0), "stop"), completion((*tokens("4"), END), "length"))

    async def run():
        gateway = Gateway(engine, chat_of(tokenizer, [0]), model="tiny", context_length=400, timeout_s=10.0)
        async with await serve(build_gateway_app(gateway)) as server, httpx.AsyncClient() as client:
            gateway.base_url = server.url
            trace_id, url = gateway.open(SAMPLING)
            replies = [(await client.post(url, json={"messages": [USER]})).json() for _ in range(2)]
            return [reply["choices"][0] for reply in replies], gateway.close(trace_id)

    shown, turns = asyncio.run(run())
    assert [choice["finish_reason"] for choice in shown] == [turn.finish_reason for turn in turns] == ["stop", "length"]
    assert [choice["message"]["content"] for choice in shown] == ["4", "4"]
    assert engine.calls[0][1].stop_ids == (0, END)


def test_tok_16_every_sampled_token_has_its_logprob_with_the_parsers_on():
    """Log-probabilities were collected for the visible content only."""
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    sampled = completion((*tokens(text, TOOLS_CHATML), END))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}

    async def run():
        async with served(Engine(sampled), TOOLS_CHATML) as (gateway, _, client):
            _, url = gateway.open(SAMPLING)
            body = {"messages": [USER], "tools": [tool], "logprobs": True, "return_token_ids": True}
            return (await client.post(url, json=body)).json()

    reply = asyncio.run(run())
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (choice["message"]["reasoning_content"], call["function"]) == ("hm", {"name": "add", "arguments": '{"a": 3}'})
    assert tuple(choice["token_ids"]) == sampled.ids
    assert tuple(entry["logprob"] for entry in choice["logprobs"]["content"]) == sampled.logprobs
    assert len(sampled.ids) == reply["usage"]["completion_tokens"]
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]


def test_tpl_03_reasoning_opened_by_the_prompt_extends_exactly():
    """The completion has only the closing tag, and the rendered history put its reasoning elsewhere."""
    engine = Engine(completion((*tokens("so 9-5.\n</think>\n\n4"), END)))

    async def run():
        async with served(engine, OPENS_REASONING) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            message = (await client.post(url, json={"messages": [USER]})).json()["choices"][0]["message"]
            await client.post(url, json={"messages": [USER, message, USER]})
            return message, gateway.close(trace_id)

    message, (first, second) = asyncio.run(run())
    assert (message["reasoning_content"], message["content"]) == ("so 9-5.", "4")
    exact = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(exact)] == exact


def test_a_repeated_call_is_a_turn_and_the_next_one_continues_the_reply_it_shows():
    spelled = tuple(token for letter in "believe" for token in tokens(letter))
    assert spelled != tokens("believe")
    engine = Engine(completion((*spelled, END)), answer("5"), answer("6"))

    async def run():
        async with served(engine) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            first = (await client.post(url, json={"messages": [USER]})).json()["choices"][0]["message"]
            await client.post(url, json={"messages": [USER]})
            await client.post(url, json={"messages": [USER, first, USER]})
            return gateway.close(trace_id)

    turns = asyncio.run(run())
    exact = turns[0].prompt_ids + turns[0].completion_ids
    assert turns[2].prompt_ids[: len(exact)] == exact


def test_rol_14_a_prompt_without_room_is_refused_before_sampling_and_earlier_turns_are_kept():
    """max_tokens went negative, and the error text was not recognised as 'too long'."""
    engine = Engine(answer("4"))
    long = {"role": "user", "content": "believe " * 100}

    async def run():
        async with served(engine, context_length=40) as (gateway, chat, client):
            trace_id, url = gateway.open(SAMPLING)
            message = (await client.post(url, json={"messages": [USER]})).json()["choices"][0]["message"]
            assert gateway.overflow(trace_id) is None
            late = await client.post(url, json={"messages": [USER, message, long]})
            assert gateway.overflow(trace_id) == late.json()["error"]["message"]
            assert gateway.failure(trace_id) is None
            untraced = await client.post("/v1/chat/completions", json={"messages": [long]})
            return chat, late, untraced, gateway.close(trace_id)

    chat, late, untraced, turns = asyncio.run(run())
    assert error_of(late) == error_of(untraced) == (400, "context_length_exceeded")
    error = late.json()["error"]
    assert error["type"] == "invalid_request_error"
    after = len(turns[0].prompt_ids + turns[0].completion_ids) + len(chat.render([long])) + len(chat.encode("\n"))
    assert f"the prompt has {after} tokens" in error["message"]
    assert "serving.context_length = 40" in error["message"]
    assert len(turns) == len(engine.calls) == 1
    assert engine.calls[0][1].max_tokens == 40 - len(turns[0].prompt_ids)


def test_the_last_token_of_the_context_can_be_sampled():
    room = len(chat_of(tiny_tokenizer()).render([USER]))

    async def status(context_length):
        engine = Engine(completion([5], "length"))
        async with served(engine, context_length=context_length) as (_, _, client):
            return (await client.post("/v1/chat/completions", json={"messages": [USER]})).status_code, engine.calls

    assert asyncio.run(status(room)) == (400, [])
    code, ((_, params),) = asyncio.run(status(room + 1))
    assert (code, params.max_tokens) == (200, 1)


@pytest.mark.parametrize(
    "form",
    [
        "{base}/t/{id}/v1/chat/completions?cid={id}",
        "{base}/t/{id}/v1/chat/completions",
        "{base}/t/{id}/v1/chat/completions?cid={id}/v1/chat/completions",  # appended without knowing of the query
        "{base}/t/{id}/v1/chat/completions/v1/chat/completions?cid={id}",  # suffix doubled
        "{base}/t/{id}/v1/chat/completions/chat/completions?cid={id}",  # taken for a base URL
        "{base}/t/{id}/v1/v1/chat/completions?cid={id}",
        "{base}/t/{id}/v1/chat/completions/",
        "{base}/t/{id}/chat/completions?cid=trace_of_someone_else",  # the path wins
        "{base}/v1/chat/completions?cid={id}",
        "{base}/v1/chat/completions?cid={id}/v1/chat/completions",
    ],
)
def test_every_known_rewriting_of_the_url_reaches_its_trace(form):
    async def run():
        async with served(Engine(answer())) as (gateway, _, client):
            trace_id, _ = gateway.open(SAMPLING)
            gateway.open(SAMPLING)
            response = await client.post(form.format(base=gateway.base_url, id=trace_id), json={"messages": [USER]})
            return response.status_code, len(gateway.close(trace_id))

    assert asyncio.run(run()) == (200, 1)


def test_unknown_keys_and_any_header_are_accepted():
    extra = {
        "model": "whatever",
        "stop_after_tool_calls": 1,
        "extra_body": {"chat_template_kwargs": {"a": 1}},
        "function_call": "auto",
        "parallel_tool_calls": False,
        "thinking_mode": "no_think",
        "thinking_budget": 3,
        "user": None,
        "stream": False,
    }
    headers = {"Authorization": "Bearer nobody", "X-API-Key": "wrong", "X-Policy-Name": "x"}

    async def run():
        async with served(Engine(answer())) as (gateway, _, client):
            _, url = gateway.open(SAMPLING)
            return (await client.post(url, json={"messages": [USER], **extra}, headers=headers)).status_code

    assert asyncio.run(run()) == 200


@pytest.mark.parametrize(
    "path", ["/t/trace_{}/v1/chat/completions", "/t/..%2f/x", "/v1/chat/completions?cid=trace_{}", "/v1/chat/completions?cid="]
)
def test_an_unknown_trace_is_404_and_samples_nothing(path):
    engine = Engine(answer())

    async def run():
        async with served(engine) as (_, _, client):
            return await client.post(path.format("0" * 32), json={"messages": [USER]})

    assert error_of(asyncio.run(run())) == (404, "unknown_trace")
    assert engine.calls == []


def test_a_closed_trace_refuses_late_calls_and_keeps_no_state():
    async def run():
        async with served(Engine(answer())) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            assert (await client.post(url, json={"messages": [USER]})).status_code == 200
            assert len(gateway.close(trace_id)) == 1
            with pytest.raises(KeyError):
                gateway.close(trace_id)
            return await client.post(url, json={"messages": [USER]})

    assert error_of(asyncio.run(run())) == (404, "unknown_trace")


def test_closing_during_calls_cancels_them_and_records_nothing():
    engine = Engine(answer())

    async def run():
        engine.release.clear()
        async with served(engine) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            calls = [asyncio.create_task(client.post(url, json={"messages": [USER]})) for _ in range(2)]
            await until(lambda: engine.calls)
            turns = gateway.close(trace_id)
            return turns, [error_of(response) for response in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == ((), [(404, "unknown_trace")] * 2)
    assert (len(engine.calls), engine.cancelled) == (1, 1)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("traced", [True, False])
def test_a_client_that_hangs_up_frees_the_sample(traced):
    engine = Engine(answer("4"), answer("5"))

    async def run():
        engine.release.clear()
        async with served(engine) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            call = asyncio.create_task(client.post(url if traced else "/v1/chat/completions", json={"messages": [USER]}))
            await until(lambda: engine.calls)
            call.cancel()
            await until(lambda: engine.cancelled)
            engine.release.set()
            reply = (await client.post(url, json={"messages": [USER]})).json()  # the trace is usable afterwards
            return reply["choices"][0]["message"]["content"], gateway.close(trace_id)

    content, turns = asyncio.run(run())
    assert content == "5"
    assert [turn.completion_ids for turn in turns] == [answer("5").ids]
    assert engine.calls[-1][1].key == (3, 1, 4, 0)


def test_calls_of_one_trace_run_one_after_another_and_those_of_others_together():
    engine = Engine(answer())

    async def run():
        engine.release.clear()
        async with served(engine) as (gateway, _, client):
            opened = [gateway.open(SamplingParams(9, key=(member,))) for member in range(3)]
            calls = [asyncio.create_task(client.post(url, json={"messages": [USER]})) for _, url in opened for _ in range(2)]
            await until(lambda: len(engine.calls) == 3)
            await asyncio.sleep(0.05)
            together = sorted(params.key for _, params in engine.calls)
            engine.release.set()
            await asyncio.gather(*calls)
            return together, [len(gateway.close(trace_id)) for trace_id, _ in opened]

    together, turns = asyncio.run(run())
    assert together == [(0, 0), (1, 0), (2, 0)]
    assert turns == [2, 2, 2]
    assert sorted(params.key for _, params in engine.calls) == [(member, turn) for member in range(3) for turn in range(2)]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (Completion((5, 6), (-0.1, NAN), (0, 0), "stop"), "logprob nan at token 1 of 2"),
        (Completion((5, 6), (-INF, -0.1), (0, 0), "stop"), "logprob -inf at token 0 of 2"),
        (Completion((5, 6), (-0.1,), (0, 0), "stop"), "2 ids, 1 logprobs and 2 versions"),
        (Completion((5,), (-0.1,), (), "stop"), "1 ids, 1 logprobs and 0 versions"),
        (Completion((), (), (), "length"), "no token"),
    ],
)
def test_an_unfit_completion_is_502_voids_the_trace_and_is_not_recorded(bad, named):
    engine = Engine(answer(), bad, answer())

    async def run():
        async with served(engine) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            replies = [await client.post(url, json={"messages": [USER]}) for _ in range(3)]
            return replies, gateway.failure(trace_id), gateway.close(trace_id)

    (good, unfit, later), failure, turns = asyncio.run(run())
    assert good.status_code == 200
    assert error_of(unfit) == (502, "invalid_completion")
    assert named in unfit.json()["error"]["message"]
    assert failure == unfit.json()["error"]["message"]
    assert error_of(later) == (502, "engine_error")
    assert (len(turns), len(engine.calls)) == (1, 2)


def test_an_engine_that_fails_is_502_and_a_retry_that_succeeds_clears_it():
    engine = Engine(ConnectionError("replica 1 is gone"), answer())

    async def run():
        async with served(engine) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            failed = await client.post(url, json={"messages": [USER]})
            told = gateway.failure(trace_id)
            assert (await client.post(url, json={"messages": [USER]})).status_code == 200
            return failed, told, gateway.failure(trace_id), gateway.close(trace_id)

    failed, told, after, turns = asyncio.run(run())
    assert error_of(failed) == (502, "engine_error")
    assert told == "the engine failed: ConnectionError: replica 1 is gone"
    assert (after, len(turns)) == (None, 1)


def test_a_sample_that_takes_too_long_is_504_and_is_cancelled():
    engine = Engine(answer())

    async def run():
        engine.release.clear()
        async with served(engine, timeout_s=0.05) as (gateway, _, client):
            trace_id, url = gateway.open(SAMPLING)
            response = await client.post(url, json={"messages": [USER]})
            return response, gateway.failure(trace_id), gateway.close(trace_id)

    response, failure, turns = asyncio.run(run())
    assert error_of(response) == (504, "timeout")
    assert failure == "no completion within rollout.timeout_s = 0.05 s"
    assert (engine.cancelled, turns) == (1, ())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"messages": "\\ud800"}', "body"),
        (b"[" * 5000, "body"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "n": 2}, "n"),
        ({"messages": [USER], "stream": True}, "stream"),
    ],
)
def test_a_malformed_traced_call_is_400_in_openai_form_and_names_the_key(body, param):
    engine = Engine(answer())

    async def run():
        async with served(engine) as (gateway, _, client):
            _, url = gateway.open(SAMPLING)
            return await client.post(url, content=body if isinstance(body, bytes) else json.dumps(body))

    response = asyncio.run(run())
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert engine.calls == []


def test_any_openai_client_can_use_the_current_policy():
    engine = Engine(answer("4"))

    async def run():
        async with served(engine) as (_, _, client):
            body = {"messages": [USER], "n": 2, "temperature": 0.3, "top_p": 0.9, "top_k": -1, "stop": ["\n"], "max_tokens": 6}
            many = (await client.post("/v1/chat/completions", json=body)).json()
            await client.post("/v1/chat/completions", json={"messages": [USER], "seed": 11})
            models, health = await client.get("/v1/models"), await client.get("/health")
            return many, models.json(), health.json()

    many, models, health = asyncio.run(run())
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["usage"]["completion_tokens"] == 2 * len(answer("4").ids)
    (_, first), (_, second), (prompt, seeded) = engine.calls
    expected = (6, 0.3, 0.9, 0, ("\n",), (END,))
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, first.stop, first.stop_ids) == expected
    assert first.key != second.key
    assert (seeded.key, seeded.temperature, seeded.max_tokens) == ((11, 0), 1.0, 400 - len(prompt))
    assert (models["data"][0]["id"], health["status"]) == ("tiny", "ok")


def test_one_failing_choice_of_several_fails_the_call():
    engine = Engine(answer(), ValueError("no"))

    async def run():
        async with served(engine) as (_, _, client):
            return await client.post("/v1/chat/completions", json={"messages": [USER], "n": 2})

    assert error_of(asyncio.run(run())) == (502, "engine_error")


def test_a_stream_is_one_chunk_and_done():
    async def run():
        async with served(Engine(answer("4"))) as (_, _, client):
            return await client.post("/v1/chat/completions", json={"messages": [USER], "stream": True})

    response = asyncio.run(run())
    assert response.headers["content-type"].startswith("text/event-stream")
    first, done, rest = response.text.split("\n\n")
    chunk = json.loads(first.removeprefix("data: "))
    assert (chunk["object"], done, rest) == ("chat.completion.chunk", "data: [DONE]", "")
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": "4"}
    assert chunk["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("as_ids", [True, False])
def test_plain_completions_take_text_or_ids(as_ids):
    engine = Engine(answer(" and four"))
    ids = tokens("nine minus five")

    async def run():
        async with served(engine) as (_, _, client):
            body = {"prompt": list(ids) if as_ids else "nine minus five", "logprobs": 0}
            return (await client.post("/v1/completions", json=body)).json()

    (choice,) = asyncio.run(run())["choices"]
    assert choice["text"] == " and four"
    assert tuple(choice["logprobs"]["token_logprobs"]) == answer(" and four").logprobs
    prompt, params = engine.calls[0]
    assert (prompt, params.max_tokens) == (ids, 16)


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**9], [[1]], None])
def test_plain_completions_refuse_prompts_that_are_none(prompt):
    engine = Engine(answer())

    async def run():
        async with served(engine) as (_, _, client):
            return await client.post("/v1/completions", json={"prompt": prompt})

    response = asyncio.run(run())
    assert error_of(response) == (400, "invalid_body")
    assert response.json()["error"]["param"].startswith("prompt")
    assert engine.calls == []


def test_opening_before_serving_says_what_to_set():
    gateway = Gateway(Engine(answer()), chat_of(tiny_tokenizer()), model="tiny", context_length=9, timeout_s=1.0)
    with pytest.raises(RuntimeError, match=r"set gateway\.base_url"):
        gateway.open(SAMPLING)
