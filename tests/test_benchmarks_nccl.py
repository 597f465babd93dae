"""benchmarks/nccl_gpu.py up to the wire: the trainer's own transport, NCCL of sockets, a server of a few routes."""

import asyncio
import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers_model import tiny_policy
from nccl_fakes import FakeLibrary, FakeVllm

from serving_bridge.publish import PublishError
from serving_bridge.vllm_client import VllmClient

FILE = Path(__file__).parent.parent / "benchmarks/nccl_gpu.py"
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("nccl_gpu", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmarks_dry_run_publishes_and_compares(bench, capsys):
    assert bench.main(["--dry-run", "--updates", "3"]) == 0
    policy, _ = tiny_policy()
    expected = bench.Outgoing(policy.table, policy.config.sizes(), "BF16").tensors
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" in ")[0] for line in lines] == [
        f"update {i + 1}: {sum(t.nbytes for t in expected)} bytes" for i in range(3)
    ]
    assert all(line.endswith(f"{len(expected)} tensors arrived bit for bit") for line in lines)


def test_the_benchmark_tells_a_machine_without_gpus_from_a_failure(bench, capsys):
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1:
        pytest.skip("this machine has GPUs")
    assert bench.main([]) == 2
    assert "NVIDIA GPUs, and two are needed" in capsys.readouterr().err


def test_an_update_that_the_server_refuses_ends_the_broadcast(bench):
    """The trainer's transport through the fakes: a 500 aborts the sender, which waits for a worker that will not come."""
    vllm, library = FakeVllm({"/update_weights": 500}), FakeLibrary()
    policy, params = tiny_policy()

    async def run():
        async with VllmClient(vllm.url, "policy") as client:
            args = SimpleNamespace(buffer_mb=bench.DRY_BUFFER_MB, timeout=DEADLINE_S, updates=1)
            await bench.measure(client, policy, params, library, None, args)

    start = time.monotonic()
    with pytest.raises(PublishError, match="update_weights answered 500"):
        asyncio.run(run())
    assert time.monotonic() - start < 10
    assert library.events.count("abort") == 1
    vllm.close()
