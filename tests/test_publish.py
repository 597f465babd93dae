"""New weights into one server: the one order, what cuts it short, and that it can always be done again."""

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from fake_vllm import BASE, LOST, FakeVllm, contents, score

from rollout.server import serve
from rollout.types import SamplingParams
from serving_bridge import publish as publishing
from serving_bridge import vllm_http
from serving_bridge.nccl import NcclSender
from serving_bridge.plugin.gspo_vllm.guard import TOKEN
from serving_bridge.publish import PublishError, publish, together
from serving_bridge.stage import Stage, Tensor
from serving_bridge.transports import LoraFolder, Nccl, SharedMemory, Stream, checksum
from serving_bridge.vllm_client import ServerError, VllmClient

SECRET = "0123456789abcdef-secret"
PARAMS = SamplingParams(max_tokens=8)
TENSORS = (Tensor("embed", "BF16", (5, 3)), Tensor("layers.0.up", "F32", (4, 4)))
ORDER = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update",
         "/reset_prefix_cache?reset_running_requests=true", "/resume"]  # fmt: skip


def arrays(seed):
    draw = np.random.default_rng(seed)
    for tensor in TENSORS:
        yield tensor.name, draw.normal(size=tensor.shape).astype("float32" if tensor.dtype == "F32" else "bfloat16")


def posts(fake):
    """The calls that change something, in order."""
    return [call.removeprefix("POST ") for call in fake.calls if call.startswith("POST ") and "generate" not in call]


@contextlib.asynccontextmanager
async def served(parent, **options):
    """`(fake, client, stage)`; `options` are the fake's."""
    fake, stage = FakeVllm(**options), Stage(TENSORS, parent)
    async with (
        await serve(fake) as server,
        VllmClient(server.url, "policy", publisher=stage.folder.name, timeout_s=20.0) as client,
    ):
        try:
            yield fake, client, stage
        finally:
            fake.close()
            stage.close()


def run(work):
    return asyncio.run(asyncio.wait_for(work, 40))


async def failure(work) -> str:
    with pytest.raises(PublishError) as caught:
        await work
    return str(caught.value)


def test_the_order_is_fixed_and_the_bytes_are_those_that_were_staged(tmp_path):
    """WSY-11: the mode is in the call, because by default what is in flight is aborted. WSY-10: twice is as good as once."""

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            for version in range(4):
                staged = stage.write(version, arrays(version // 2))
                timings = await publish(client, staged, SharedMemory(), 5.0)
                assert posts(fake)[-len(ORDER) :] == ORDER
                assert len(posts(fake)) == len(ORDER) * (version + 1)
                assert fake.weights == checksum(staged) == contents(staged.path)[0]
                assert await client.version() == version
                assert not fake.paused
                laps = [timings.pause, timings.transfer, timings.verify, timings.reset, timings.resume]
                assert all(lap > 0 for lap in laps)
                assert timings.paused == pytest.approx(sum(laps))
            assert [body for path, body in fake.bodies if path == "/finish_weight_update"][-1] == {"weight_version": staged.id}

    run(work())


def test_wsy_02_no_token_of_new_weights_follows_a_prefix_of_old_ones(tmp_path):
    """Requests come all the time, many with the same prompt, while updates of some length are applied."""

    async def work():
        async with served(tmp_path, apply_s=0.1) as (fake, client, stage):
            stopped, found = asyncio.Event(), []

            async def fire(worker):
                while not stopped.is_set():
                    found.append(await client.sample((worker % 3, 7, 7, 7), replace(PARAMS, key=(worker, len(found)))))

            workers = [asyncio.create_task(fire(worker)) for worker in range(12)]
            for version in range(4):
                await asyncio.sleep(0.1)
                await publish(client, stage.write(version, arrays(version)), SharedMemory(), 5.0)
            await asyncio.sleep(0.1)
            stopped.set()
            await asyncio.gather(*workers)
            calls = [call.removeprefix("POST ").partition("?")[0] for call in fake.calls]
            for version in range(4):
                steps = [call for call in calls if call in {step.partition("?")[0] for step in ORDER}][6 * version :][:6]
                assert steps == [step.partition("?")[0] for step in ORDER]
            paused = False
            for call in calls:
                paused = call == "/pause" or (paused and call != "/resume")
                assert not (paused and call == "admit")
            assert len(fake.finished) == len(found) > 100
            assert {len(each.ids) for each in found} == {8}  # none was broken off
            assert [request.prefix for request in fake.finished] == [request.weights[-1] for request in fake.finished]
            label = {version: weights for request in fake.finished
                     for version, weights in zip(request.versions, request.weights, strict=True)}  # fmt: skip
            assert len(label) == len(set(label.values())) == 5  # a version is one set of weights
            seen = {version for each in found for version in each.versions}
            assert seen == {-1, 0, 1, 2, 3}
            assert any(len(set(each.versions)) > 1 for each in found)  # requests were in flight when weights changed
            assert all(list(each.versions) == sorted(each.versions) for each in found)

    run(work())


def test_prefixes_that_stay_are_a_failure(tmp_path):
    """WSY-01: a server that says it could not forget them must not be used."""

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            fake.faults["/reset_prefix_cache"].append(lambda: {"success": False})
            said = await failure(publish(client, stage.write(0, arrays(0)), SharedMemory(), 5.0))
            assert "keeps prefixes that it computed with the old weights" in said
            assert fake.paused  # and so it samples nothing with them

    run(work())


def test_wsy_06_a_transfer_that_outlasts_its_deadline_is_applied_once(tmp_path):
    """The reply comes after the client gave up; whoever publishes again waits for what is being applied and adds nothing."""

    async def work():
        async with served(tmp_path, apply_s=1.6) as (fake, client, stage):
            staged = stage.write(0, arrays(0))
            started = time.monotonic()
            said = await failure(publish(client, staged, SharedMemory(), 0.2))
            assert 1.0 < time.monotonic() - started < 1.6  # an update is given a second at least
            assert "no answer within" in said
            assert "serving.sync_timeout_s = 0.2 s" in said
            assert f"{client.url}/update_weights" in said
            assert posts(fake).count("/update_weights") == 1
            for _ in range(3):
                await publish(client, staged, SharedMemory(), 5.0)
            assert fake.applied == [staged.id]
            assert (fake.weights, await client.version(), fake.paused) == (checksum(staged), 0, False)

    run(work())


@pytest.mark.parametrize("fault", ["drop", "lose"])
@pytest.mark.parametrize("path", [step.partition("?")[0] for step in ORDER] + ["/weight_info", "/metrics"])
def test_a_lost_connection_costs_a_repetition(tmp_path, path, fault):
    """Before the work was done or after it: one whole update either way."""

    async def work():
        async with served(tmp_path, apply_s=0.05) as (fake, client, stage):
            fake.faults[path] += [fault, fault]
            staged = stage.write(0, arrays(0))
            await publish(client, staged, SharedMemory(), 5.0)
            assert fake.applied == [staged.id]
            assert (fake.weights, await client.version(), fake.paused) == (checksum(staged), 0, False)
            fake.faults[path] += ["drop"] * 3
            with contextlib.suppress(PublishError):  # it is not tried for ever
                await publish(client, stage.write(1, arrays(1)), SharedMemory(), 5.0)
            assert not fake.faults[path]

    run(work())


@pytest.mark.parametrize("path", [step.partition("?")[0] for step in ORDER] + ["/weight_info", "/metrics"])
def test_wsy_07_a_phase_that_is_never_answered_is_bounded_and_named(tmp_path, path, monkeypatch):
    for module in (publishing, vllm_http):
        monkeypatch.setattr(module, "ADMIN_S", 0.4)

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            fake.faults[path].append("hang")
            started = time.monotonic()
            said = await failure(publish(client, stage.write(0, arrays(0)), SharedMemory(), 0.4))
            assert time.monotonic() - started < 4.0
            assert f"{client.url}{path}: no answer within" in said
            await publish(client, stage.write(1, arrays(1)), SharedMemory(), 5.0)
            assert (await client.version(), fake.paused) == (1, False)

    run(work())


@pytest.mark.parametrize("path", [step.partition("?")[0] for step in ORDER] + ["/weight_info", "/metrics"])
def test_an_error_is_not_repeated_and_says_the_phase_and_the_reason(tmp_path, path):
    async def work():
        async with served(tmp_path) as (fake, client, stage):
            fake.faults[path].append(500)
            said = await failure(publish(client, stage.write(0, arrays(0)), SharedMemory(), 5.0))
            assert f"{client.url}{path} answered 500: scripted 500" in said
            assert stage.folder.name in said
            await publish(client, stage.write(1, arrays(1)), SharedMemory(), 5.0)
            assert (fake.weights, await client.version()) == (contents(stage.folder / "1" / "model.safetensors")[0], 1)

    run(work())


def test_an_update_that_is_refused_leaves_the_version_and_the_next_one_is_whole(tmp_path):
    """A file that lacks a tensor, or whose bytes are not those that were written."""

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            good = stage.write(0, arrays(0))
            transport = SharedMemory(1)
            transport.offer(good)
            await publish(client, good, transport, 5.0)
            staged = stage.write(1, arrays(1))
            transport.offer(staged)
            data = bytearray(staged.path.read_bytes())
            staged.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            assert "crc32" in await failure(publish(client, staged, transport, 5.0))
            assert "2 tensors" in await failure(publish(client, replace(staged, names=("embed",)), SharedMemory(), 5.0))
            assert (fake.weights, await client.version()) == (checksum(good), 0)
            staged.path.write_bytes(data)
            await publish(client, staged, transport, 5.0)
            assert (fake.weights, await client.version(), fake.paused) == (checksum(staged), 1, False)

    run(work())


def test_a_server_that_says_another_version_than_it_was_sent_is_refused(tmp_path):
    async def work():
        async with served(tmp_path) as (fake, client, stage):
            answer = {"weight_version": "default"}
            fake.faults["/weight_info"] += [None, lambda: answer]
            said = await failure(publish(client, stage.write(3, arrays(0)), SharedMemory(), 5.0))
            assert f"says it has weights 'default' after it was sent '{stage.folder.name}.3'" in said
            fake.faults["/weight_info"] += [lambda: "text"]
            assert "no JSON object" in await failure(publish(client, stage.write(4, arrays(0)), SharedMemory(), 5.0))

    run(work())


STEPS = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"]


@pytest.mark.parametrize("last", STEPS)
@pytest.mark.parametrize("fresh", [False, True], ids=["same trainer", "next trainer"])
def test_a_publish_that_was_cut_short_after_any_call_is_done_again(tmp_path, last, fresh):
    """The trainer ended between two calls. The same one repeats its publish, or the next one publishes what it has."""

    class Killed(Exception):
        pass

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            post = client.post

            async def upto(path, *args, **kwargs):
                done = await post(path, *args, **kwargs)
                if path == last:
                    raise Killed
                return done

            client.post = upto
            staged = stage.write(0, arrays(0))
            with pytest.raises(Killed):
                await publish(client, staged, SharedMemory(), 5.0)
            waiting = asyncio.create_task(client.sample((1, 2), PARAMS))
            await asyncio.sleep(0.05)
            again = Stage(TENSORS, tmp_path) if fresh else stage
            async with VllmClient(client.url, "policy", publisher=again.folder.name) as other:
                new = again.write(0, arrays(1)) if fresh else staged
                await publish(other, new, SharedMemory(), 5.0)
                assert (await other.version(), fake.weights, fake.paused) == (0, checksum(new), False)
                assert len((await waiting).ids) == 8  # what waited goes on
                assert (await other.sample((1, 2), PARAMS)).versions == (0,) * 8
            assert fake.applied.count(new.id) == 1
            if not fresh and last in STEPS[3:]:
                assert posts(fake).count("/update_weights") == 1  # it had the version, and was only resumed
            again.close()

    run(work())


# asleep


@pytest.mark.parametrize("level", [1, 2])
def test_wsy_12_a_server_that_is_asleep_is_sent_nothing(tmp_path, level):
    """Writing to weights that are not mapped ends the engine. The error says what state it is in."""

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            await client.post("/sleep", level=str(level))
            before = posts(fake)
            said = await failure(publish(client, stage.write(0, arrays(0)), SharedMemory(), 5.0))
            assert f"{client.url} is asleep; wake it (POST /wake_up)" in said
            assert posts(fake) == before
            await client.post("/wake_up")
            staged = stage.write(1, arrays(1))
            await publish(client, staged, SharedMemory(), 5.0)
            assert (fake.weights, await client.version()) == (checksum(staged), 1)

    run(work())


def test_wsy_12_a_server_that_is_only_paused_is_not_asleep(tmp_path):
    """vLLM's /is_sleeping is true of both, and a trainer that was killed leaves a paused one."""

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            for mode in ("keep", "abort"):
                await client.post("/pause", mode=mode)
                assert (await client.idle(), (await client.slept())[0]) == (True, False)
                await publish(client, stage.write(0, arrays(0)), SharedMemory(), 5.0)
                assert (await client.idle(), (await client.slept())[0]) == (False, False)
            fake.faults["/metrics"].append(lambda: "vllm:other 1.0")  # started with --disable-log-stats
            await client.post("/pause", mode="keep")
            assert (await client.slept())[0]

    run(work())


@pytest.mark.parametrize("level", [1, 2])
def test_wsy_03_after_a_sleep_the_weights_are_sent_again_though_the_version_is_there(tmp_path, level):
    """A deep sleep loses them, and leaves the version's name and the worker's memory of the update."""

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            staged = stage.write(0, arrays(0))
            await publish(client, staged, SharedMemory(), 5.0)
            await client.post("/sleep", level=str(level))
            await client.post("/wake_up")
            assert await client.version() == 0
            assert fake.weights == (LOST if level == 2 else checksum(staged))
            await publish(client, staged, SharedMemory(), 5.0)
            assert fake.weights == checksum(staged)
            assert fake.applied == [staged.id] * 2
            assert (await client.version(), fake.paused, fake.updating) == (0, False, False)

    run(work())


# transports


def test_a_stream_carries_what_was_staged(tmp_path, monkeypatch):
    """Over TCP, with the worker's own reading; also again after a sleep."""
    monkeypatch.setenv(TOKEN, SECRET)

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            transport = Stream(SECRET, "127.0.0.1", delta=False)
            try:
                for version in range(3):
                    if (old := stage.overwritten(version)) is not None:
                        transport.vacate(old)
                    staged = stage.write(version, arrays(version))
                    transport.offer(staged)
                    await transport.connect(client, 5.0)
                    await publish(client, staged, transport, 5.0)
                    assert (fake.weights, await client.version()) == (checksum(staged), version)
                await client.post("/sleep", level="2")
                await client.post("/wake_up")
                await publish(client, staged, transport, 5.0)
                assert fake.weights == checksum(staged)
                transport.vacate(staged)
                later = stage.write(5, arrays(5))  # not offered
                assert "not offered" in await failure(publish(client, later, transport, 5.0))
            finally:
                await transport.aclose()

    run(work())


class Communicator(NcclSender):
    """One without NCCL, which has tests of its own. Its updates are files, so that they can be applied."""

    made: ClassVar[list["Communicator"]] = []
    file = ""

    def __init__(self, pack):
        self.calls: list[Any] = []
        self.made.append(self)

    plan = property(lambda self: [["embed", "layers.0.up"]])

    def init_info(self, workers):
        return {"world_size": 1 + workers}

    def update_info(self, tensors):
        return {"id": f"{id(self)}.{len(self.calls)}", "file": self.file, "count": 2}

    def connect(self, deadline_s):
        self.calls.append(("connect", deadline_s))

    def send(self, groups, deadline_s):
        self.calls.append(("send", [[name for name, _ in group] for group in groups]))

    def abort(self, reason):
        self.calls.append(("abort", reason))

    def close(self):
        self.calls.append(("close",))


def test_each_start_of_a_server_has_a_communicator_of_its_own_and_leaves_none_behind(tmp_path):
    """Of the size that the server says; one that is started again gets another, and the old one is closed."""
    Communicator.made.clear()

    def closed():
        return [each.calls.count(("close",)) for each in Communicator.made]

    async def work():
        async with served(tmp_path) as (fake, client, stage):
            staged = stage.write(0, arrays(0))
            Communicator.file = str(staged.path)
            transport = Nccl(lambda each: arrays(each.version), len, [("embed", "float32", (1,))], sender=Communicator)
            await transport.connect(client, 5.0)
            assert ("/init_weight_transfer_engine", {"init_info": {"world_size": 2}}) in fake.bodies
            await publish(client, staged, transport, 5.0)
            assert Communicator.made[0].calls == [("connect", 5.0), ("send", [["embed", "layers.0.up"]])]
            fake.faults["/update_weights"].append(500)
            assert "scripted 500" in await failure(publish(client, stage.write(3, arrays(1)), transport, 5.0))
            async with VllmClient(client.url, "policy") as other:
                await transport.connect(other, 5.0)  # of another server: both stay
                assert closed() == [0, 0]
            again = VllmClient(client.url, "policy", publisher=stage.folder.name)
            await transport.connect(again, 5.0)
            assert closed() == [0, 1, 0]
            await transport.connect(again, 5.0)
            assert closed() == [0, 1, 1, 0]
            await transport.aclose()
            assert closed() == [1, 1, 1, 1]
            await again.aclose()

    run(work())


def adapter(parent, rank=4):
    return Stage(TENSORS, parent, file="adapter_model.safetensors", beside={"adapter_config.json": json.dumps({"r": rank})})


def test_lor_01_the_adapter_is_there_before_its_version_and_changes_with_it(tmp_path):
    """A run pushed frozen weights, and the adapter's slot was never filled. LOR-02: and old prefixes are forgotten after it."""

    async def work():
        async with served(tmp_path, names=["policy-base"]) as (fake, client, _):
            stage = adapter(tmp_path)
            client = VllmClient(client.url, "policy", publisher=stage.folder.name)
            seen = []
            for version in range(3):
                staged = stage.write(version, arrays(version))
                await publish(client, staged, LoraFolder("policy"), 5.0)
                assert posts(fake)[-5:] == [ORDER[0], "/v1/load_lora_adapter", "/update_weight_version", *ORDER[-2:]]
                assert ("/update_weight_version", {"new_version": staged.id}) in fake.bodies
                assert fake.adapters == {"policy": checksum(staged)}
                assert fake.weights == BASE
                assert await client.version() == version
                found = await client.sample((1, 2, 3), PARAMS)
                assert found.versions == (version,) * 8
                assert fake.finished[-1].prefix == checksum(staged)
                seen.append(await client.probe([1, 2, 3]))
                assert seen[-1] == score(checksum(staged), [1, 2, 3])
            assert len({tuple(each) for each in seen}) == 3
            loads = [body for path, body in fake.bodies if path == "/v1/load_lora_adapter"]
            assert all(body["load_inplace"] for body in loads)
            await client.aclose()
            stage.close()

    run(work())


def test_lor_05_an_adapter_that_the_server_refuses_is_not_called_loaded(tmp_path):
    """Too large a rank, or a name that the base model has."""

    async def work():
        async with served(tmp_path, names=["policy-base"]) as (fake, client, _):
            for stage, name, expected in (
                (adapter(tmp_path, 17), "policy", "LoRA rank 17 is greater than max_lora_rank 16"),
                (adapter(tmp_path), "policy-base", "'policy-base' has already been loaded"),
            ):
                said = await failure(publish(client, stage.write(0, arrays(0)), LoraFolder(name), 5.0))
                assert expected in said
                assert (fake.version, fake.adapters, fake.paused) == ("default", {}, True)
                stage.close()

    run(work())


def test_both_sides_of_a_transfer_end_together():
    """`together`: the first failure cancels the other and is raised; a cancellation reaches both."""
    ended = []

    async def side(name, seconds, error=None):
        try:
            await asyncio.sleep(seconds)
            if error:
                raise error
        finally:
            ended.append(name)

    async def work():
        await together(side("a", 0.0), side("b", 0.02))
        for first, second in ((("c", 0.0, ServerError("x", gone=True)), ("d", 9.0)), (("e", 9.0), ("f", 0.0, KeyError("y")))):
            with pytest.raises((ServerError, KeyError)):
                await together(side(*first), side(*second))
        task = asyncio.create_task(together(side("g", 9.0), side("h", 9.0)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(asyncio.wait_for(work(), 5))
    assert sorted(ended) == list("abcdefgh")
