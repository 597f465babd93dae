"""Servers that a fleet starts itself, that are killed and come back, and how a fleet ends."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_fleet import LONG, PARAMS, QUICK, Rig, kill, launch, processes, remote, rig, run, sockets

from serving_bridge import member as members
from serving_bridge.fleet import FleetError
from serving_bridge.vllm_client import ServerError
from serving_bridge.vllm_server import ServerDied


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Looks come forty times as often."""
    monkeypatch.setattr(members, "POLL_S", 0.05)
    monkeypatch.setattr(members, "HEALTH_S", 0.5)


# the end


def test_problems_of_any_server_are_said_at_the_start(tmp_path):
    async def work():
        async with rig(tmp_path, 2, opened=False) as it:
            it.fakes[1].config["model_config"] |= {"logprobs_mode": "raw_logprobs", "quantization": "fp8"}
            with pytest.raises(FleetError) as caught:
                await it.fleet.open()
            lines = str(caught.value).splitlines()
            assert lines[0] == f"server 1 at {it.servers[1].url} cannot be trained with:"
            assert len(lines) == 3
            with pytest.raises(FleetError, match="the fleet was closed"):
                await it.fleet.sample((1,), PARAMS)
        it = Rig(tmp_path)
        with pytest.raises(ServerError, match=r"http://127.0.0.1:1/health: ConnectError"):
            await it.make(["http://127.0.0.1:1"]).open()
        it.stage.close()

    run(work())


def test_when_all_are_gone_every_reason_is_named(tmp_path):
    """Came back as something else; broke the transport. Who waits is told, and so is who publishes or asks later."""

    async def work():
        async with rig(tmp_path, 2) as it:
            it.fakes[0].config["model_config"]["dtype"] = "torch.bfloat16"
            it.fakes[0].restart()
            await it.until(lambda: it.state()[0] == "gone")
            assert (await it.fleet.sample((1,), PARAMS)).versions == (0,) * 8

            async def broken(client, timeout_s):
                raise KeyError("world_size")

            it.transport.connect = broken
            it.fakes[1].paused = True
            it.fakes[1].going.clear()
            waiting = it.sample(3)
            for attempt in (*waiting, it.fleet.sample((1,), PARAMS), it.publish()):
                with pytest.raises(FleetError) as caught:
                    await attempt
                said = str(caught.value)
                assert "server 0: server 0 at" in said
                assert "it computes in bfloat16; start it with --dtype float32" in said
                assert "server 1: KeyError: 'world_size'" in said
            assert it.state() == ["gone", "gone"]

    run(work())


def test_closing_ends_whoever_waits(tmp_path):
    """Requests in flight and requests that wait for a server; a second close does nothing."""

    async def work():
        async with rig(tmp_path, 1) as it:
            running = it.sample(3, replace(LONG, max_tokens=10**6))
            await it.until(lambda: len(it.fakes[0].running) == 3)
            it.fleet.members[0].state = "alive"
            waiting = it.sample(3)
            await asyncio.sleep(0.05)
            for _ in range(2):
                await it.fleet.aclose()
            for task in (*running, *waiting):
                with pytest.raises(FleetError, match="no vLLM server is left: server 0: the fleet was closed"):
                    await task
            assert it.state() == ["gone"]
            await it.until(lambda: not it.fakes[0].running)
            assert it.fakes[0].calls[-1] != "POST /shutdown"  # the server goes on

    run(work())


# servers that are ours


@pytest.mark.timeout(120)
def test_wsy_13_killed_servers_come_back_with_the_current_weights_and_no_request_is_lost(tmp_path):
    """Killed with 64 requests running; in the middle of a transfer; between its end and the resumption."""

    async def work():
        before = set(sockets())
        it = Rig(tmp_path / "shm", timeout_s=60.0, restarts=replace(QUICK, limit=10))
        it.make([launch(tmp_path / name, it.stage.folder) for name in ("one", "two")])
        try:
            await it.fleet.open()
            await it.publish()
            await it.publish()

            # in the middle of a rollout
            tasks = it.sample(64, replace(LONG, max_tokens=150), prompt=lambda i: (i // 8, *range(40)))
            while (await remote(it, 0))["running"] < 16 or (await remote(it, 1))["running"] < 16:
                await asyncio.sleep(0.02)
            kill(it.fleet.members[0].server)
            found = await asyncio.gather(*tasks)
            assert {each.versions for each in found} == {(1,) * 150}
            state = await remote(it, 1)
            mine = [seed for seed in state["seeds"] if seed is not None]
            assert len(mine) == len(set(mine))  # none twice
            assert it.reasons()[0][0] == "server 0"
            await it.serving()
            state = await remote(it, 0)
            assert [each.rpartition(".")[2] for each in state["applied"]] == ["1"]
            assert ("server 0", "with version 1") in it.reasons("server.rejoined")
            calls = [call for call in state["calls"] if call.startswith("POST") and "probe" not in call]
            assert calls.index("POST /resume") < calls.index("POST /inference/v1/generate")  # the probe is the first

            for path, version in (("/update_weights", 2), ("/resume", 3)):
                it.events.clear()
                await remote(it, 1, {path: ["die"]})
                done = await it.publish()
                assert done.timings.keys() == {"server 0"}
                assert f"did not take version {version}" in done.failed["server 1"]
                await it.until(lambda: any("killed by signal 9" in reason for _, reason in it.reasons()))
                assert {each.versions for each in await asyncio.gather(*it.sample(8))} == {(version,) * 8}
                await it.serving()
                assert (await remote(it, 1))["weights"] == (await remote(it, 0))["weights"]
                assert it.reasons("server.rejoined") == [("server 1", f"with version {version}")]
            assert {each.versions for each in await asyncio.gather(*it.sample(16))} == {(3,) * 8}
        finally:
            await it.fleet.aclose()
            it.stage.close()
        assert processes(tmp_path) == []
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        await it.until(lambda: set(sockets()) <= before)

    asyncio.run(asyncio.wait_for(work(), 100))


@pytest.mark.timeout(120)
def test_restarts_are_used_up(tmp_path):
    """One restart is allowed. Then the run ends, with the reason and the key to change, and nothing is left."""

    async def work():
        it = Rig(tmp_path / "shm", restarts=replace(QUICK, limit=1))
        it.make([launch(tmp_path / "one", it.stage.folder)])
        (server,) = [member.server for member in it.fleet.members]
        try:
            await it.fleet.open()
            await it.publish()
            kill(server)
            await it.until(lambda: it.state() == ["dead"])
            tasks = it.sample(2)
            await it.serving()
            assert {each.versions for each in await asyncio.gather(*tasks)} == {(0,) * 8}
            kill(server)
            tasks = it.sample(2)
            for attempt in (*tasks, it.publish()):
                with pytest.raises(FleetError, match=r"killed by signal 9.*serving.launch.max_restarts = 1 are used up"):
                    await attempt
            assert it.state() == ["gone"]
            assert [kind for kind, _ in itertools.groupby(event["type"] for event in it.events)] == [
                "server.starting", "server.ready", "server.fenced", "server.starting", "server.ready", "server.rejoined",
                "server.fenced",
            ]  # fmt: skip
            assert "killed by signal 9, probably because memory ran out" in it.reasons()[-2][1]
            assert all(event["message"] for event in it.events if event["type"] in ("server.fenced", "server.rejoined"))
        finally:
            await it.fleet.aclose()
            it.stage.close()
        assert processes(tmp_path) == []

    asyncio.run(asyncio.wait_for(work(), 100))


@pytest.mark.timeout(120)
def test_a_fleet_that_cannot_be_started_leaves_nothing(tmp_path):
    """One of two servers does not start; and one starts and refuses what would be trained."""

    async def work():
        for break_it, error, message in (
            ({"python": Path("/bin/false")}, ServerDied, "did not start"),
            ({"name": "other", "token": "not-the-clients-token"}, FleetError, "refuses the token"),
        ):
            it = Rig(tmp_path / "shm")
            it.make([launch(tmp_path / "good", it.stage.folder), launch(tmp_path / "bad", it.stage.folder, **break_it)])
            with pytest.raises(error, match=message):
                await it.fleet.open()
            assert processes(tmp_path) == []
            it.stage.close()

    asyncio.run(asyncio.wait_for(work(), 100))
