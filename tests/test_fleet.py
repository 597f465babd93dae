"""Several servers as one engine: who gets requests, who is fenced and why, and how it comes back."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import httpx
import pytest
from fake_vllm import BASE, LOST, FakeVllm, score
from helpers_fleet import IDS, LONG, PARAMS, acknowledged, arrays, generated, rig, run

from rollout.server import serve
from serving_bridge import member as members
from serving_bridge.capabilities import Needs, problems
from serving_bridge.fleet import FleetError, Probe
from serving_bridge.member import MOVED
from serving_bridge.transports import LoraFolder, checksum
from serving_bridge.vllm_client import ServerError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Looks come forty times as often."""
    monkeypatch.setattr(members, "POLL_S", 0.05)
    monkeypatch.setattr(members, "HEALTH_S", 0.5)


# publishing to all


def test_all_servers_have_what_was_published_last(tmp_path):
    async def work():
        async with rig(tmp_path, 3) as it:
            for version in range(1, 4):
                done = await it.publish()
                assert done.failed == {}
                assert done.timings.keys() == done.gaps.keys() == {"server 0", "server 1", "server 2"}
                assert set(done.gaps.values()) == {0.0}
                assert len({fake.weights for fake in it.fakes}) == 1
                found = await asyncio.gather(*it.sample(12))
                assert {each.versions for each in found} == {(version,) * 8}
            assert it.reasons() == []
            assert Counter(event["type"] for event in it.events) == {"server.ready": 3}

    run(work())


def test_requests_before_the_first_publish_wait_for_it(tmp_path):
    """WSY-13: alive is not ready. Nobody asks a server for tokens of weights that it was not sent."""

    async def work():
        async with rig(tmp_path, opened=False) as it:
            await it.fleet.open()
            assert it.state() == ["alive", "alive"]
            tasks = it.sample(4)
            await asyncio.sleep(0.1)
            assert [generated(fake) for fake in it.fakes] == [0, 0]
            await it.publish()
            assert {each.versions for each in await asyncio.gather(*tasks)} == {(0,) * 8}

    run(work())


def test_wsy_04_a_server_that_missed_an_update_is_fenced_and_the_others_serve(tmp_path):
    """The fan-out is not atomic: one answers 500 when others have switched. No reply may come from the old weights."""

    async def work():
        async with rig(tmp_path, 3) as it:
            it.fakes[2].faults["/update_weights"] += [500] * 100
            before = generated(it.fakes[2])
            done = await it.publish()
            assert done.failed.keys() == {"server 2"}
            assert "answered 500: scripted 500" in done.failed["server 2"]
            assert done.timings.keys() == {"server 0", "server 1"}
            found = await asyncio.gather(*it.sample(40))
            assert {each.versions for each in found} == {(1,) * 8}
            assert generated(it.fakes[2]) == before
            name, reason = it.reasons()[0]
            assert (name, reason) == ("server 2", done.failed["server 2"])
            assert "did not take version 1: transfer within serving.sync_timeout_s = 5 s of" in reason
            assert acknowledged(it.fakes[2]) == {0}
            it.fakes[2].faults["/update_weights"].clear()
            await it.serving()
            assert acknowledged(it.fakes[2]) == {0, 1}
            assert it.fakes[2].weights == it.fakes[0].weights
            assert it.reasons("server.rejoined") == [("server 2", "with version 1")]

    run(work())


def test_wsy_15_every_completion_carries_versions_that_its_server_acknowledged(tmp_path):
    """Requests all the time, publishes all the time; versions only grow within a completion."""

    async def work():
        async with rig(tmp_path, 2, apply_s=0.02) as it:
            stopped, found = asyncio.Event(), []

            async def fire(worker):
                while not stopped.is_set():
                    asked = it.version
                    completion = await it.fleet.sample((worker,), replace(PARAMS, key=(worker, len(found))))
                    found.append((asked, completion, it.version))

            workers = [asyncio.create_task(fire(worker)) for worker in range(16)]
            for version in range(9):
                await it.until(lambda version=version: any(each.versions[0] == version for _, each, _ in found))
                await it.publish() if version < 8 else stopped.set()
            await asyncio.gather(*workers)
            for asked, completion, answered in found:
                assert list(completion.versions) == sorted(completion.versions)
                assert asked - 1 <= completion.versions[0]
                assert completion.versions[-1] <= answered
            seen = {version for _, each, _ in found for version in each.versions}
            assert seen == set(range(9))
            assert it.reasons() == []
            for fake in it.fakes:
                assert acknowledged(fake) == seen
                assert [each.prefix for each in fake.finished] == [each.weights[-1] for each in fake.finished]

    run(work())


@pytest.mark.parametrize("right", [True, False], ids=["passed", "failed"])
def test_tokens_of_weights_that_are_not_verified_yet_are_held_back(tmp_path, right):
    """Requests that were kept go on, and end, before the probe is answered. The server is not to blame; its weights may be."""

    async def work():
        async with rig(tmp_path, 1) as it:
            fake = it.fakes[0]
            tasks = it.sample(8, LONG)
            await it.until(lambda: len(fake.running) == 8 and len(fake.running[-1].tokens) > 20)
            released = asyncio.Event()
            fake.faults["/inference/v1/generate"].append((released, None if right else 500))
            publishing = asyncio.create_task(it.publish())
            await it.until(lambda: len(fake.finished) == 9)  # and the probe of version 0
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in tasks)
            released.set()
            done = await publishing
            found = await asyncio.gather(*tasks)
            assert (done.failed == {}) == right
            expected = {0, 1} if right else {1}
            assert all(set(each.versions) == expected for each in found)
            assert (it.reasons() == []) == right

    run(work())


def test_wsy_06_a_slow_server_comes_back_with_one_apply(tmp_path):
    """Its update outlasts the deadline. Whoever sends it again attaches to what is being applied."""

    async def work():
        async with rig(tmp_path, 2, sync_timeout_s=0.3) as it:
            it.fakes[1].apply_s = 2.0
            done = await it.publish()
            assert "no answer within" in done.failed["server 1"]
            assert "serving.sync_timeout_s = 0.3 s" in done.failed["server 1"]
            assert {each.versions for each in await asyncio.gather(*it.sample(8))} == {(1,) * 8}
            await it.serving()
            assert [each.rpartition(".")[2] for each in it.fakes[1].applied] == ["0", "1"]
            assert it.fakes[1].weights == it.fakes[0].weights

    run(work())


def test_wsy_07_a_server_that_never_answers_holds_nobody_up(tmp_path):
    """A publish that waits for it is bounded and names it."""

    async def work():
        async with rig(tmp_path, 2, sync_timeout_s=1.0) as it:
            it.fakes[0].faults["/update_weights"].append("hang")
            started = time.monotonic()
            done = await it.publish()
            assert time.monotonic() - started < 3.0
            assert f"{it.servers[0].url}/update_weights: no answer within" in done.failed["server 0"]
            assert {each.versions for each in await asyncio.gather(*it.sample(8))} == {(1,) * 8}

    run(work())


def test_wsy_07_a_server_that_falls_silent_is_noticed_before_its_requests_run_out_of_time(tmp_path, monkeypatch):
    """It accepts connections, and nothing comes. What it was asked goes to the other."""
    monkeypatch.setattr(members, "HEALTH_S", 0.1)

    async def work():
        async with rig(tmp_path, 2, timeout_s=50.0) as it:
            for fake in it.fakes:
                fake.token_s = 0.01
            tasks = it.sample(20, replace(LONG, max_tokens=60))
            await it.until(lambda: all(len(fake.running) >= 5 for fake in it.fakes))
            silent = it.fakes[1]
            silent.going.clear()
            silent.faults["/health"] += ["hang"] * 1000
            found = await asyncio.gather(*tasks)
            assert {each.versions for each in found} == {(0,) * 60}
            assert it.state()[1] == "dead"
            assert it.reasons()[0] == ("server 1", f"GET {it.servers[1].url}/health: no answer within 0.1 s")
            assert silent.hung_up >= 5

    run(work())


def test_a_look_that_is_not_answered_once_is_no_death(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "HEALTH_S", 0.1)

    async def work():
        async with rig(tmp_path, 1) as it:
            it.fakes[0].faults["/health"] += ["hang", "drop"] * 2
            it.fakes[0].faults["/is_sleeping"] += ["hang"] * (members.MISSES + 2)  # its engine is in a long step
            await it.until(lambda: not it.fakes[0].faults["/is_sleeping"])
            await asyncio.sleep(0.3)
            assert it.reasons() == []
            it.fakes[0].faults["/health"] += [503]  # its engine is dead
            await it.until(it.reasons)
            assert it.reasons() == [("server 0", f"GET {it.servers[0].url}/health answered 503: scripted 503")]

    run(work())


# the probe


def test_a_stale_server_is_noticed(tmp_path):
    """It acknowledges an update, and computes with the weights before. It is fenced, and sent them again."""

    async def work():
        async with rig(tmp_path, 2, most_gap=100.0) as it:
            it.fakes[1].faults["/update_weights"] += ["stale"]
            done = await it.publish()
            assert done.failed.keys() == {"server 1"}
            assert "at the trainer and by 0 at the server since weights last arrived" in done.failed["server 1"]
            assert "it has stale weights" in done.failed["server 1"]
            assert {each.versions for each in await asyncio.gather(*it.sample(20))} == {(1,) * 8}

    run(work())


@pytest.mark.parametrize(("part", "stale"), [(0.02, True), (0.22, True), (0.24, False), (1.0, False)])
def test_a_server_that_hardly_follows_is_stale(tmp_path, part, stale):
    """In other company the same weights give other last bits: a server that moved far less than the trainer is stale, too."""

    async def work():
        async with rig(tmp_path, 1, most_gap=100.0) as it:
            before = score(it.fakes[0].weights, IDS)
            rows = [{str(token): {"logprob": x - part}} for token, x in zip(IDS[1:], before, strict=True)]
            it.fakes[0].faults["/inference/v1/generate"].append(lambda: {"prompt_logprobs": [None, *rows]})
            done = await it.publish(logprobs=[x - 1.0 for x in before])
            assert bool(done.failed) == stale
            assert (
                not stale
                or f"moved by 1 nats per token at the trainer and by {part:g} at the server" in done.failed["server 0"]
            )

    run(work())


def test_a_probe_that_differs_too_much_is_an_error(tmp_path):
    """Nothing is sampled with weights that are not the trainer's. Also: a probe that is not a number, on either side."""

    async def work():
        async with rig(tmp_path, 2, opened=False) as it:
            await it.fleet.open()
            staged = it.stage.write(0, arrays(0))
            right = score(checksum(staged), IDS)
            wrong = [x + 0.21 * (-1) ** i for i, x in enumerate(right)]  # 0.21 on average, over the 0.2 that pass
            with pytest.raises(FleetError, match=r"no server took the weights of version 0: server 0: .*differ by 0\.21 nats"):
                await it.fleet.publish(staged, Probe(IDS, tuple(wrong)))
            assert [generated(fake) for fake in it.fakes] == [1, 1]  # the probes
        async with rig(tmp_path, 2) as it:
            close = [x + 0.19 * (-1) ** i for i, x in enumerate(score(checksum(it.stage.write(1, arrays(1))), IDS))]
            done = await it.publish(1, logprobs=close)
            assert list(done.gaps.values()) == pytest.approx([0.19, 0.19])
            done = await it.publish(2, logprobs=[float("nan")] * len(close))
            assert all("differ by nan nats per token" in reason for reason in done.failed.values())
            assert len(done.failed) == 2

    run(work())


def test_weights_that_hardly_move_are_not_stale(tmp_path):
    """A learning rate that warms up changes float32 weights and none of the bfloat16 ones that are served: the same bytes."""

    async def work():
        async with rig(tmp_path, 1) as it:
            there = score(it.fakes[0].weights, IDS)
            for step in range(1, 4):
                moved = [x + 0.3 * MOVED * step for x in there]
                assert (await it.publish(0, logprobs=moved)).failed == {}
            moved = [x + 0.3 * MOVED * 4 for x in there]  # in all more than MOVED, though each step was less
            done = await it.publish(0, logprobs=moved)
            assert "stale weights" in done.failed["server 0"]

    run(work())


def test_a_publish_without_a_probe_verifies_what_the_server_says(tmp_path):
    async def work():
        async with rig(tmp_path, 1) as it:
            done = await it.fleet.publish(it.stage.write(1, arrays(1)))
            assert (done.gaps, done.failed, it.state()) == ({}, {}, ["serving"])

    run(work())


# asleep, paused, started anew


@pytest.mark.parametrize("level", [1, 2])
def test_wsy_03_a_server_that_somebody_put_to_sleep_serves_nothing_until_it_was_sent_the_weights(tmp_path, level):
    """A deep sleep loses them, and after it the server looks as before: same version, healthy."""

    async def work():
        async with rig(tmp_path, 2) as it:
            victim = it.fakes[0]
            tasks = it.sample(16, LONG)
            await it.until(lambda: len(victim.running) >= 4)
            async with httpx.AsyncClient(base_url=it.servers[0].url) as http:
                await http.post(f"/sleep?level={level}")
                await it.until(lambda: it.state()[0] == "dead")
                found = await asyncio.gather(*tasks)  # what it broke off was sampled on the other
                asked = generated(victim)
                await asyncio.gather(*it.sample(20))
                assert generated(victim) == asked
                assert it.state() == ["dead", "serving"]
                await http.post("/wake_up")
                assert victim.weights == (LOST if level == 2 else it.fakes[1].weights)
                await it.serving()
            assert victim.weights == it.fakes[1].weights
            assert len(victim.applied) == 2
            assert it.reasons()[0] == ("server 0", "somebody else paused it or put it to sleep")
            assert any("is asleep; wake it (POST /wake_up)" in reason for _, reason in it.reasons()[1:])
            found += await asyncio.gather(*it.sample(40))
            assert {version for each in found for version in each.versions} == {0}
            assert all(LOST not in each.weights for each in victim.finished)

    run(work())


def test_a_server_that_is_asleep_at_the_start_is_an_error(tmp_path):
    async def work():
        async with rig(tmp_path, 2, opened=False) as it:
            it.fakes[1].paused = it.fakes[1].asleep = True
            with pytest.raises(ServerError, match=f"{it.servers[1].url} is asleep; wake it"):
                await it.fleet.open()
            assert it.fakes[1].bodies[-1][0] != "/init_weight_transfer_engine"

    run(work())


def test_a_server_that_an_earlier_run_left_paused_in_the_middle_of_an_update_is_taken_over(tmp_path):
    """The trainer was killed between two calls; the next one has a stage, and versions, of its own."""

    async def work():
        async with rig(tmp_path, 2, opened=False) as it:
            for fake in it.fakes:
                fake.version, fake.weights, fake.paused, fake.updating = "gspo-earlier.7", 99, True, True
                fake.going.clear()
            await it.fleet.open()
            done = await it.publish()
            assert done.failed == {}
            assert {each.versions for each in await asyncio.gather(*it.sample(8))} == {(0,) * 8}

    run(work())


@pytest.mark.parametrize("looks", [True, False], ids=["idle", "asked"])
def test_wsy_13_a_server_that_started_anew_serves_nothing_until_it_was_sent_the_weights(tmp_path, looks, monkeypatch):
    """At the same address, healthy, with the weights of its start. Seen by a look, or by the version of a completion."""
    monkeypatch.setattr(members, "POLL_S", 0.05 if looks else 1e6)

    async def work():
        async with rig(tmp_path, 2) as it:
            await it.publish()
            victim = it.fakes[1]
            victim.restart()
            if looks:
                await it.until(it.reasons)
                assert "it has weights 'default' after it was sent" in it.reasons()[0][1]
                assert BASE not in {weights for each in victim.finished for weights in each.weights}
            found = await asyncio.gather(*it.sample(40))
            if not looks:
                assert it.reasons()[0] == ("server 1", "server 1 sampled with weights [-1] that it was not sent")
            assert {each.versions for each in found} == {(1,) * 8}  # what came of the old weights was not returned
            await it.serving()
            assert {each.versions for each in await asyncio.gather(*it.sample(40))} == {(1,) * 8}
            assert victim.weights == it.fakes[0].weights
            after = victim.calls[len(victim.calls) - victim.calls[::-1].index("POST /init_weight_transfer_engine") :]
            assert after.index("POST /resume") < next(i for i, call in enumerate(after) if "generate" in call)

    run(work())


def test_lor_01_a_server_that_lost_its_adapter_is_given_it_again(tmp_path):
    """It answers 404 for a model that it no longer knows, and that is no fault of the request."""

    async def work():
        beside = {"adapter_config.json": json.dumps({"r": 4})}
        options = {"stage": {"file": "adapter_model.safetensors", "beside": beside}, "transport": LoraFolder("policy")}
        check = partial(problems, needs=Needs(512, "float32", "", 4))
        async with rig(tmp_path, 2, names=("policy-base",), check=check, **options) as it:
            it.fakes[0].restart()
            found = await asyncio.gather(*it.sample(30))
            assert {each.versions for each in found} == {(0,) * 8}
            await it.serving()
            assert it.fakes[0].adapters == it.fakes[1].adapters == {"policy": it.fakes[1].finished[-1].weights[-1]}
            await it.publish()
            assert it.fakes[0].adapters == it.fakes[1].adapters

    run(work())


def test_a_server_that_vanishes_and_comes_back_is_given_the_weights(tmp_path):
    """Nobody's request is lost: it moves on, or waits. Meanwhile the others are published to."""

    async def work():
        async with rig(tmp_path, 2) as it:
            port = it.servers[1].port
            tasks = it.sample(16, LONG)
            await it.until(lambda: len(it.fakes[1].running) >= 4)
            await it.servers[1].aclose()
            found = await asyncio.gather(*tasks)
            assert {each.versions for each in found} == {(0,) * 200}
            await it.until(lambda: it.state() == ["serving", "dead"])
            await it.publish()
            fresh = it.fakes[1] = FakeVllm()
            it.servers[1] = await serve(fresh, port=port)
            await it.serving()
            assert (acknowledged(fresh), fresh.weights) == ({1}, it.fakes[0].weights)
            assert ("server 1", "with version 1") in it.reasons("server.rejoined")
            await asyncio.gather(*it.sample(30))
            assert generated(fresh) > 1

    run(work())


def test_the_only_server_that_vanishes_is_waited_for(tmp_path):
    async def work():
        async with rig(tmp_path, 1) as it:
            port = it.servers[0].port
            await it.servers[0].aclose()
            tasks = it.sample(4)
            await it.until(lambda: it.state() == ["dead"])
            done = await it.publish()  # nobody took it; who comes back will
            assert (done.timings, done.failed) == ({}, {})
            it.fakes[0] = FakeVllm()
            it.servers[0] = await serve(it.fakes[0], port=port)
            assert {each.versions for each in await asyncio.gather(*tasks)} == {(1,) * 8}

    run(work())


def test_a_server_that_fails_again_and_again_is_not_tried_without_pause(tmp_path):
    """0.05, 0.1 and 0.2 s before the first three attempts, 0.2 s before any other."""

    async def work():
        async with rig(tmp_path, 2) as it:
            it.fakes[1].faults["/update_weights"] += [500] * 10000
            await it.publish()
            started, attempts = time.monotonic(), it.fakes[1].calls.count
            for more, least in ((1, 0.05), (2, 0.15), (3, 0.35), (4, 0.55), (5, 0.75)):
                await it.until(lambda more=more: attempts("POST /pause?mode=keep") == 2 + more)
                assert time.monotonic() - started >= least - 0.02

    run(work())


# requests


def test_an_answer_from_before_a_server_was_fenced_is_not_taken_for_one_of_after(tmp_path):
    """A request is held by a paused server that others then take over; it must be sampled anew, elsewhere."""

    async def work():
        async with rig(tmp_path, 2) as it:
            tasks = it.sample(12, LONG)
            await it.until(lambda: len(it.fakes[0].running) >= 4)
            async with httpx.AsyncClient(base_url=it.servers[0].url) as http:
                await http.post("/pause?mode=keep")
                held = len(it.fakes[0].running)
                await it.until(lambda: it.state()[0] == "dead")
                assert {len(each.ids) for each in await asyncio.gather(*tasks)} == {200}
            await it.serving()
            await it.until(lambda: it.fakes[0].hung_up >= held > 0)
            assert len(it.reasons()) == 1  # what came late accuses nobody
            assert await asyncio.gather(*it.sample(20))

    run(work())


def test_a_request_that_one_server_fails_goes_to_another(tmp_path):
    """Healthy, and every request fails: its neighbour does the work, whatever was computed where before."""

    async def work():
        async with rig(tmp_path, 2) as it:
            it.fakes[0].faults["/inference/v1/generate"] += [500] * 1000
            asked = generated(it.fakes[0])
            for _ in range(3):
                assert (await it.fleet.sample(tuple(range(40)), PARAMS)).versions == (0,) * 8
            assert generated(it.fakes[0]) == asked + 1  # the rest went where the first ended
            found = await asyncio.gather(*it.sample(30))
            assert {each.versions for each in found} == {(0,) * 8}
            assert len(it.fakes[1].finished) == 34  # and the probe
            assert it.reasons() == []

    run(work())


def test_a_request_that_all_servers_fail_is_given_up_with_the_reason(tmp_path):
    async def work():
        async with rig(tmp_path, 2) as it:
            for fake in it.fakes:
                fake.faults["/inference/v1/generate"] += [500] * 1000
            with pytest.raises(
                FleetError, match=r"failed 8 times, the last time because POST .*generate answered 500: scripted"
            ):
                await it.fleet.sample((1,), PARAMS)
            for fake in it.fakes:
                fake.faults["/inference/v1/generate"].clear()
            assert (await it.fleet.sample((1,), PARAMS)).versions == (0,) * 8
            assert it.reasons() == []

    run(work())


@pytest.mark.parametrize("status", [400, 422])
def test_a_request_that_is_refused_is_not_tried_elsewhere(tmp_path, status):
    async def work():
        async with rig(tmp_path, 2) as it:
            asked = sum(map(generated, it.fakes))
            for fake in it.fakes:
                fake.faults["/inference/v1/generate"].append(status)
            with pytest.raises(ValueError, match=f"answered {status}: scripted {status}"):
                await it.fleet.sample((1,), PARAMS)
            assert sum(map(generated, it.fakes)) == asked + 1
            assert it.reasons() == []

    run(work())


def not_a_number(reply):
    reply["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    return reply


def miscounted(reply):
    reply["choices"][0]["logprobs"]["content"].pop()
    return reply


@pytest.mark.parametrize(("spoil", "message"), [(not_a_number, "is not a number"), (miscounted, "8 ids, and log-prob.* of 7")])
def test_a_completion_that_cannot_be_trained_on_is_an_error(tmp_path, spoil, message):
    async def work():
        async with rig(tmp_path, 1) as it:
            it.fakes[0].spoil = spoil
            with pytest.raises(ValueError, match=message):
                await it.fleet.sample((1,), PARAMS)

    run(work())


def test_det_03_a_seed_does_not_depend_on_the_server(tmp_path):
    """Replicas gave the same text for different members, or a replay on other servers another text."""

    async def work():
        found = []
        for count in (1, 3):
            async with rig(tmp_path, count) as it:
                found.append([each.ids for each in await asyncio.gather(*it.sample(8, prompt=lambda i: (5, 6)))])
        assert found[0] == found[1]
        assert len(set(found[0])) == 8

    run(work())


# who gets a request


def test_groups_stay_together_in_a_fleet(tmp_path):
    async def work():
        async with rig(tmp_path, 2) as it:
            prompt = {group: tuple(range(100 * group, 100 * group + 40)) for group in range(4)}
            await asyncio.gather(*it.sample(16, LONG, prompt=lambda i: prompt[i // 4]))
            groups = [{each.prompt for each in fake.finished if each.prompt != IDS} for fake in it.fakes]
            assert [len(each) for each in groups] == [2, 2]
            assert not groups[0] & groups[1]
            again = [asyncio.create_task(it.fleet.sample((*prompt[group], 1, 2, 3), PARAMS)) for group in range(4)]
            await asyncio.gather(*again)
            for fake, mine in zip(it.fakes, groups, strict=True):
                assert {each.prompt[:40] for each in fake.finished if each.prompt != IDS} == mine

    run(work())
