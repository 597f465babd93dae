"""A launched vLLM server: its command line, its environment, its life and death. Most servers here are small scripts."""

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from helpers_model import tiny_model_folder
from hypothesis import given
from hypothesis import strategies as st

from serving_bridge import vllm_launch, vllm_server
from serving_bridge.supervise import descendants, processes, reason, without_secrets
from serving_bridge.vllm_launch import MAX_LORA_RANKS, Launch, command, environment, on_cpu
from serving_bridge.vllm_server import Restarts, ServerDied, VllmServer

ROOT = Path(__file__).parent.parent
REAL = ROOT / ".venv-vllm" / "bin" / "python"
TOKEN = "the-admin-token-0123456789"

SERVER = """
import http.server, json, os, pathlib, signal, subprocess, sys, time
here, plan = pathlib.Path(__file__).parent, json.loads(pathlib.Path(__file__).with_name("plan.json").read_text())
shared = None
if plan.get("shared_memory"):  # this starts a resource tracker, as vLLM's queues do
    from multiprocessing import shared_memory
    shared = shared_memory.SharedMemory(create=True, size=4096)
seen = {"argv": sys.argv, "env": dict(os.environ), "pid": os.getpid(), "group": os.getpgid(0), "stdin": os.read(0, 1).decode()}
seen["shared"] = shared and shared.name
(here / f"seen-{os.getpid()}.json").write_text(json.dumps(seen))
child = "import signal, sys, time, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); %s time.sleep(300)"
for own_session in plan.get("children", []):
    subprocess.Popen([sys.executable, "-S", "-c", child % ("os.setsid();" if own_session else ""), str(here)])
if plan.get("orphan"):  # its parent ends at once
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', *sys.argv[1:]])"
    subprocess.run([sys.executable, "-S", "-c", code, "-c", child % "", str(here)])
if plan.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.buffer.write(plan.get("log", "").encode("latin-1"))
sys.stdout.flush()
if plan.get("signal"):
    os.kill(os.getpid(), plan["signal"])
if plan.get("code") is not None:
    sys.exit(plan["code"])
time.sleep(plan.get("delay", 0))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(plan.get("status", 200) if self.path == "/health" else 404)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
if plan.get("lifetime") is not None:
    server.timeout = 0.05
    end = None
    while end is None or time.monotonic() < end:
        server.handle_request()
        end = end or time.monotonic() + plan["lifetime"]
    print(plan.get("last_words", ""), flush=True)
    sys.exit(plan.get("last_code", 1))
server.serve_forever()
"""


def launch_of(folder, *, python=None, **changes):
    values = {
        "python": python or folder / "python",
        "model": folder / "model",
        "name": "policy",
        "log": folder / "logs" / "vllm-0.log",
        "context_length": 64,
        "slots": 4,
        "dtype": "float32",
        "backend": "gspo",
        "shm": folder / "shm",
        "token": TOKEN,
        "start_timeout_s": 30.0,
    }
    return Launch(**(values | changes))


def fake(folder, **plan):
    """A launch whose interpreter is a script that pretends to be vLLM and does what `plan` says."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "plan.json").write_text(json.dumps(plan))
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -S\n{SERVER}")
    program.chmod(0o755)
    return launch_of(folder)


def alive(folder):
    """Ids of running processes, however they descend, with `folder` on their command line."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in words and int(entry) != os.getpid():
            found.append(int(entry))
    return found


def seen(folder):
    """What each fake server that was started in `folder` saw, by start."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"), key=lambda p: p.stat().st_mtime_ns)]


def left(folder):
    """What is left of the fake servers of `folder`: processes, folders, shared memory."""
    begun = [start for server in (folder, *folder.glob("*/")) for start in seen(server)]
    paths = [Path(start["env"]["PYTHONPATH"].split(":")[1]) for start in begun]
    paths += [Path("/dev/shm") / start["shared"] for start in begun if start["shared"]]
    return [*alive(folder), *(path for path in paths if path.exists())]


def gone(folder, within_s=10.0):
    """Whether nothing of them is left after at most `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while left(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left(folder)


@asynccontextmanager
async def started(launch, **options):
    server = VllmServer(launch, **options)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


def failure(launch, **options):
    """The message with which a start fails."""

    async def run():
        async with started(launch, **options):
            pass

    with pytest.raises(ServerDied) as caught:
        asyncio.run(run())
    return str(caught.value)


def value_of(argv, flag):
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_launch, "DEVICES", tmp_path / "no-devices")


# command line


def test_command_says_what_training_rests_on(tmp_path, no_gpu):
    argv = command(launch_of(tmp_path, context_length=9000, slots=7, dtype="bfloat16"), 4321)
    assert argv[:3] == [str(tmp_path / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in {
        "--model": str(tmp_path / "model"),
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": "4321",
        "--max-model-len": "9000",
        "--max-num-seqs": "7",
        "--dtype": "bfloat16",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--middleware": "gspo_vllm.guard.AdminToken",
    }.items():
        assert value_of(argv, flag) == value
    assert json.loads(value_of(argv, "--weight-transfer-config")) == {"backend": "gspo"}
    assert "--enable-scale-out" in argv
    assert TOKEN not in " ".join(argv)
    assert TOKEN not in repr(launch_of(tmp_path))


def test_cpu_prefills_whole_prompts_and_gpu_decides_itself(tmp_path, no_gpu):
    for length in (64, 8192, 8193):
        argv = command(launch_of(tmp_path, context_length=length), 1)
        assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(argv)
        assert int(value_of(argv, "--max-num-batched-tokens")) >= max(8192, length)
    argv = command(launch_of(tmp_path, gpus=(0, 3), tensor_parallel=2), 1)
    assert not {"--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens"} & set(argv)
    assert value_of(argv, "--tensor-parallel-size") == "2"


def test_gpu_is_noticed_by_its_device(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_launch, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert on_cpu(())
    assert not on_cpu((1,))
    (tmp_path / "nvidia3").touch()  # a container may see the fourth only
    assert not on_cpu(())


def test_adapters_get_the_smallest_rank_that_vllm_takes(tmp_path):
    for rank in range(1, MAX_LORA_RANKS[-1] + 1):
        given = int(value_of(command(launch_of(tmp_path, max_lora_rank=rank), 1), "--max-lora-rank"))
        assert given in MAX_LORA_RANKS
        assert given >= rank
        assert not [allowed for allowed in MAX_LORA_RANKS if rank <= allowed < given]
    assert value_of(command(launch_of(tmp_path, max_lora_rank=8), 1), "--max-loras") == "1"
    assert "--enable-lora" not in command(launch_of(tmp_path), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lora_rank": 513}, "rank is 513; vLLM serves ranks 1 to 512"),
        ({"max_lora_rank": -1}, "rank is -1"),
        ({"slots": 0}, "slots is 0; it must be at least 1"),
        ({"context_length": 0}, "context_length is 0"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be 'bfloat16' or 'float32'"),
        ({"name": "--port"}, "'--port'; it must be printable text that does not start with '-'"),
        ({"name": "a\nb"}, "must be printable"),
        ({"token": ""}, "token of a vLLM server must be printable ASCII"),
        ({"token": "a\r\nb"}, "token of a vLLM server must be printable ASCII"),
        ({"tensor_parallel": 2, "gpus": (0,)}, "tensor_parallel is 2; gpus must name as many, not 1"),
    ],
)
def test_wrong_values_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        launch_of(tmp_path, **changes)


OURS = """
    host port uds model served-model-name dtype logprobs-mode generation-config override-generation-config
    weight-transfer-config middleware enable-scale-out config max-model-len max-num-seqs tensor-parallel-size
    enable-lora max-lora-rank max-loras api-key hf-token ssl-keyfile ssl-certfile root-path headless grpc
"""


@pytest.mark.parametrize("flag", OURS.split())
def test_extra_arguments_cannot_override(tmp_path, flag):
    """In all spellings of vLLM's parser: underscores, `=value`, `.key`, the beginning of a name, `--no-`."""
    spellings = [
        f"--{flag}",
        f"--{flag}=x",
        f"--{flag}.backend",
        f"--{flag.replace('-', '_')}",
        f"--no-{flag}",
        f"--{flag[:-1]}",
    ]
    for spelling in spellings:
        with pytest.raises(ValueError, match=rf"extra_args holds '{spelling}', which sets --"):
            command(launch_of(tmp_path, extra_args=("--seed", "3", spelling, "x")), 1)


def test_extra_arguments_cannot_override_by_a_short_name_or_end_the_options(tmp_path):
    for words in (("-tp", "2"), ("--", "x")):
        with pytest.raises(ValueError, match=f"extra_args holds '{words[0]}'"):
            command(launch_of(tmp_path, extra_args=words), 1)


def test_other_extra_arguments_come_last(tmp_path):
    extra = ("--swap-space", "-1", "--gpu-memory-utilization=0.4", "--seed", "7", "--hf-overrides", '{"a.b": "--port"}')
    assert command(launch_of(tmp_path, extra_args=extra), 1)[-len(extra) :] == list(extra)


@pytest.mark.parametrize("argument", ["--enable-chunked-prefill", "--enable_chunked_prefill", "--enable-chunked"])
def test_chunked_prefill_is_refused_on_a_cpu_only(tmp_path, no_gpu, argument):
    with pytest.raises(ValueError, match=rf"'{argument}'.*CPU Generator does not use offset"):
        command(launch_of(tmp_path, extra_args=(argument,)), 1)
    assert command(launch_of(tmp_path, gpus=(0,), extra_args=(argument,)), 1)[-1] == argument
    assert command(launch_of(tmp_path, extra_args=("--no-enable-chunked-prefill",)), 1)


# environment

SECRETS = {
    "OPENAI_API_KEY": "hidden-1",
    "HF_TOKEN": "hidden-2",
    "aws_secret_access_key": "hidden-3",
    "DB_PASSWORD": "hidden-4",
    "VLLM_API_KEY": "hidden-5",
    "HTTPS_PROXY": "http://me:hidden-6@proxy:3128",
    "GSPO_VLLM_TOKEN": "hidden-7",
}
PLAIN = {
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "9",
    "HTTP_PROXY": "http://proxy:3128",
    "HF_HOME": "/models",
}


def test_environment_is_ours_without_secrets_and_without_our_interpreter(tmp_path, monkeypatch):
    dropped = {"PYTHONPATH": "/x", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/x", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--x"}
    for name, value in (SECRETS | PLAIN | dropped).items():
        monkeypatch.setenv(name, value)
    env = environment(launch_of(tmp_path), tmp_path / "site")
    assert "hidden" not in json.dumps(env)
    assert [name for name, value in env.items() if TOKEN in value] == ["GSPO_VLLM_TOKEN"]
    assert {name: env.get(name) for name in PLAIN} == PLAIN
    assert not {"PYTHONHOME", "VIRTUAL_ENV", "JAX_PLATFORMS", "XLA_FLAGS"} & set(env)
    assert env["PYTHONPATH"].split(":") == [str(ROOT / "serving_bridge" / "plugin"), str(tmp_path / "site")]
    assert env["VLLM_RPC_BASE_PATH"] == str(tmp_path / "site")
    assert env["GSPO_VLLM_SHM"] == str(tmp_path / "shm")
    assert env["PATH"].split(":")[0] == str(tmp_path)
    expected = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    assert expected.items() <= env.items()


@given(st.text("ABCXYZ_", max_size=6), st.sampled_from(["KEY", "token", "SECRET", "Password", "CREDENTIAL", "COOKIE"]))
def test_any_name_with_a_secret_word_is_left_out(around, word):
    kept = {"PATH": "/bin", f"A{around}": "1"}
    assert without_secrets(kept | {f"{around}{word}{around}": "x"}) == kept


def test_environment_of_a_cpu_yields_to_the_users(tmp_path, monkeypatch, no_gpu):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "MALLOC_ARENA_MAX", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "5")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    env = environment(launch_of(tmp_path, max_lora_rank=4), tmp_path)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "5"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["MALLOC_ARENA_MAX"] == "1"
    assert env["VLLM_PLUGINS"] == "mine,gspo_vllm"
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    env = environment(launch_of(tmp_path, gpus=(2, 5)), tmp_path)
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "MALLOC_ARENA_MAX", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"} & set(env)


def test_gpus_count_among_those_of_this_process(tmp_path, monkeypatch):
    launch = launch_of(tmp_path, gpus=(2, 1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(launch, tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,7")
    assert environment(launch, tmp_path)["CUDA_VISIBLE_DEVICES"] == "7,GPU-a"
    assert environment(launch_of(tmp_path), tmp_path)["CUDA_VISIBLE_DEVICES"] == "4,GPU-a,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match=r"GPU 2 is not among CUDA_VISIBLE_DEVICES = 4,5; see compute\.topology"):
        environment(launch, tmp_path)


def test_site_makes_vllm_find_the_plugin(tmp_path):
    """What vLLM does in each of its processes, in an interpreter that has nothing installed."""
    vllm_launch.write_site(tmp_path)
    code = "from importlib.metadata import entry_points as e; print([p.load() for p in e(group='vllm.general_plugins')])"
    env = environment(launch_of(tmp_path), tmp_path)
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert "<function register at" in done.stdout, done.stderr


# life


def test_starts_answers_and_leaves_nothing(tmp_path, monkeypatch):
    """Also: two servers have two ports, the token is in the environment only, and each start is headed in the log."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    first, second = (fake(tmp_path / name, delay=0.3, children=[False, True], orphan=True) for name in "ab")

    async def run():
        async with started(first, grace_s=0.3) as a, started(second, grace_s=0.3) as b, httpx.AsyncClient() as http:
            assert a.url != b.url
            for server in (a, b):
                assert server.running
                assert (await http.get(f"{server.url}/health")).status_code == 200
                assert len(descendants(server.pid)) == 4
            with pytest.raises(RuntimeError, match="runs already"):
                await a.start()
            assert len(alive(tmp_path)) == 2 * (1 + 4)
            for process in alive(tmp_path):
                assert TOKEN.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
                assert b"hidden" not in Path(f"/proc/{process}/environ").read_bytes()
        assert not a.running
        assert await a.died() == "it was stopped"
        await a.stop()
        assert left(tmp_path) == []
        await a.start()
        await a.stop()

    asyncio.run(run())
    assert left(tmp_path) == []
    begun = seen(tmp_path / "a")
    assert len(begun) == 2
    assert begun[0]["env"]["GSPO_VLLM_TOKEN"] == TOKEN
    assert begun[0]["stdin"] == ""
    assert begun[0]["pid"] == begun[0]["group"]
    log = first.log.read_text()
    for start in begun:
        assert f"=== vLLM server policy, port {value_of(start['argv'], '--port')}, " in log
    assert TOKEN not in log


def test_starts_many_at_once_on_ports_of_their_own(tmp_path):
    launches = [fake(tmp_path / str(i), delay=0.2) for i in range(6)]

    async def run():
        servers = [VllmServer(launch) for launch in launches]
        try:
            await asyncio.gather(*(server.start() for server in servers))
            assert len({server.url for server in servers}) == len(servers)
        finally:
            await asyncio.gather(*(server.stop() for server in servers))

    asyncio.run(run())
    assert left(tmp_path) == []


def test_health_is_waited_for_and_the_deadline_ends_the_server(tmp_path):
    launch = fake(tmp_path, status=503, stubborn=True, children=[False])
    message = failure(launch_of(tmp_path, start_timeout_s=1.0), grace_s=0.2)
    assert "not healthy within serving.launch.start_timeout_s = 1 s" in message
    assert str(launch.log) in message
    assert left(tmp_path) == []


def test_a_cancelled_start_leaves_nothing(tmp_path):
    launch = fake(tmp_path, delay=60, children=[False])

    async def run():
        task = asyncio.create_task(VllmServer(launch, grace_s=0.2).start())
        while len(alive(tmp_path)) < 3:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert left(tmp_path) == []


def test_shared_memory_of_a_server_that_must_be_killed_is_freed(tmp_path):
    launch = fake(tmp_path, stubborn=True, shared_memory=True)

    async def run():
        async with started(launch, grace_s=0.3):
            assert (Path("/dev/shm") / seen(tmp_path)[0]["shared"]).exists()

    asyncio.run(run())
    assert left(tmp_path) == []


def test_death_is_noticed_and_what_it_left_is_ended(tmp_path):
    launch = fake(tmp_path, lifetime=0.3, last_words="RuntimeError: broken", last_code=3, children=[False, True], orphan=True)

    async def run():
        async with started(launch, grace_s=0.2) as server:
            async with asyncio.timeout(15):
                assert await server.died() == "RuntimeError: broken"
            assert left(tmp_path) == []
            assert not server.running
            await server.stop()
            assert await server.died() == "RuntimeError: broken"
            await server.start()
            assert server.running

    asyncio.run(run())
    assert left(tmp_path) == []


def test_stop_while_it_starts(tmp_path):
    launch = fake(tmp_path, delay=60)

    async def run():
        server = VllmServer(launch, grace_s=0.2)
        task = asyncio.create_task(server.start())
        while not seen(tmp_path):
            await asyncio.sleep(0.02)
        await asyncio.gather(server.stop(), server.stop())
        with pytest.raises(ServerDied, match="it was stopped"):
            await task

    asyncio.run(run())
    assert left(tmp_path) == []


def test_never_started(tmp_path):
    server = VllmServer(launch_of(tmp_path))
    asyncio.run(server.stop())
    assert not server.running
    with pytest.raises(RuntimeError, match="was not started"):
        asyncio.run(server.died())


# nothing outlives its owner

OWNER = """
import asyncio, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from serving_bridge.vllm_launch import Launch
from serving_bridge.vllm_server import VllmServer

async def main():
    server = VllmServer(Launch(**{launch!r}), grace_s=0.3)
    await server.start()
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def owned(folder, launch):
    """Another process that has started the server of `launch`."""
    values = {name: getattr(launch, name) for name in launch.__dataclass_fields__}
    code = OWNER.format(root=str(ROOT), tests=str(ROOT / "tests"), launch=values).replace("PosixPath", "Path")
    script = folder / "owner.py"
    script.write_text(code)
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == b"started\n"
        yield owner
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_trainer_takes_its_server_along(tmp_path, number):
    launch = fake(tmp_path, children=[False, True], orphan=True, stubborn=True)

    async def run():
        async with owned(tmp_path, launch) as owner:
            assert len(alive(tmp_path)) == 6
            owner.send_signal(number)
            owner.wait(10)

    asyncio.run(run())
    assert gone(tmp_path)


def test_a_server_ends_with_the_pipe_to_its_owner(tmp_path):
    async def run():
        async with started(fake(tmp_path), grace_s=0.3) as server:
            pipe = server._run.process._process.stdin
            pipe.close()
            async with asyncio.timeout(10):
                await server.died()

    asyncio.run(run())
    assert left(tmp_path) == []


def test_ctrl_c_in_the_trainers_terminal_reaches_no_server(tmp_path):
    launch = fake(tmp_path)

    async def run():
        async with owned(tmp_path, launch) as owner:
            table = {process.pid: process for process in processes()}
            (server,) = seen(tmp_path)
            assert os.getpgid(server["pid"]) != os.getpgid(owner.pid)
            assert table[server["pid"]].session not in (owner.pid, table[owner.pid].session)

    asyncio.run(run())
    assert gone(tmp_path)


def test_a_killed_supervisor_leaves_nothing(tmp_path):
    launch = fake(tmp_path, stubborn=True, children=[False], orphan=True, shared_memory=True)

    async def run():
        async with started(launch, grace_s=0.3) as server:
            assert len(left(tmp_path)) == 4 + 2
            os.kill(server.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                assert "killed by signal 9" in await server.died()
            assert left(tmp_path) == []

    asyncio.run(run())


def test_supervisor_and_trainer_killed_together_end_the_server(tmp_path):
    launch = fake(tmp_path)

    async def run():
        async with owned(tmp_path, launch) as owner:
            (server,) = seen(tmp_path)
            supervisor = next(process.parent for process in processes() if process.pid == server["pid"])
            os.kill(owner.pid, signal.SIGSTOP)  # so that it cannot do anything about it
            os.kill(supervisor, signal.SIGKILL)
            os.kill(owner.pid, signal.SIGKILL)

    asyncio.run(run())
    deadline = time.monotonic() + 10
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive(tmp_path) == []
    for folder in left(tmp_path):  # nobody was there to remove it
        shutil.rmtree(folder)


def test_a_process_that_the_trainer_forked_does_not_keep_its_server_alive(tmp_path):
    """A fork holds the other end of the supervisor's pipe too, so the pipe does not end with the trainer."""
    launch = fake(tmp_path)

    async def run():
        async with owned(tmp_path, launch) as owner:
            (supervisor,) = [p.pid for p in processes() if p.parent == owner.pid]
            pipe = os.readlink(f"/proc/{supervisor}/fd/0")
            end = next(fd for fd in os.listdir(f"/proc/{owner.pid}/fd") if os.readlink(f"/proc/{owner.pid}/fd/{fd}") == pipe)
            with open(f"/proc/{owner.pid}/fd/{end}", "wb", buffering=0):
                owner.kill()
                owner.wait()
                assert await asyncio.to_thread(gone, tmp_path)

    asyncio.run(run())


# reasons

PREFIX = "(EngineCore pid=7) ERROR 11-30 09:11:17 [core.py:1100] "
LOGS = {
    "offset": (f"{PREFIX}RuntimeError: CPU Generator does not use offset\nEngineDeadError: x\n", "--no-enable-chunked-prefill"),
    "kv": (
        f"{PREFIX}ValueError: To serve at least one request with the model's max seq len (64), (9 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (2 GiB).\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
        "lower serving.context_length or serving.slots, or raise VLLM_CPU_KVCACHE_SPACE",
    ),
    "kv none": (f"{PREFIX}ValueError: No available memory for the cache blocks. Try\n", "VLLM_CPU_KVCACHE_SPACE"),
    "port": ("OSError: [Errno 98] Address already in use\n", "an address that it needs is taken"),
    "model": ("ValueError: Model architectures ['X'] are not supported for now.\n", "does not know the model's type"),
    "model type": ("`x` but Transformers does not recognize this architecture.\n", "does not know the model's type"),
    "gpu": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to\n",
        "too little free GPU memory: lower serving.slots",
    ),
    "gpu shared": (
        "ValueError: Free memory on device cuda:0 (1/80 GiB)\n",
        "lower serving.slots or --gpu-memory-utilization",
    ),
    "memory": ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you\n", "the machine is out of memory"),
    "worker": (f"{PREFIX}Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting\n", "because memory ran out"),
    "vllm": ("python: Error while finding module (ModuleNotFoundError: No module named 'vllm')\n", "make install-vllm"),
    "option": ("usage: x\napi_server.py: error: unrecognized arguments: --nope\n", "check serving.launch.extra_args"),
    "disk": ("OSError: [Errno 28] No space left on device\n", "/dev/shm is full"),
    "device": ("RuntimeError: Failed to infer device type, please set\n", "serving.launch.python"),
    "other": (
        "Traceback:\n  raise Odd(\nmy.OddError: \x1b[31mthe\x00 cause\x1b[0m\nnanobind: leaked 4 instances!\n",
        "my.OddError: the  cause",
    ),
    "first hand": (f"KeyError: 'cause'\n{PREFIX}RuntimeError: failed. See root cause above.\n", "KeyError: 'cause'"),
    "long": (
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (64) is greater than the derived max_model_len (32)\n",
        "serving.context_length is more than the model's longest sequence",
    ),
    "refused": (
        "x.ValidationError: 2 validation errors for Y\n  Value error, the cause\n    For further information\n",
        "the cause",
    ),
    "flood": (
        f"{PREFIX}KeyError: 'cause'\n" + f"{PREFIX}a\n{PREFIX}x.EngineDeadError: see above\n" * 40_000,
        "KeyError: 'cause'",
    ),
    "engine killed": (f"{PREFIX}x.EngineDeadError: EngineCore encountered an issue.\n" * 3, "ended without a word"),
    "worker killed": (
        f"{PREFIX}Worker proc VllmWorker-0 died unexpectedly (exit code: None), x\n{PREFIX}RuntimeError: Executor failed.\n",
        "ended without a word",
    ),
    "warned": (f"{PREFIX.replace('ERROR', 'WARNING')}ImportError: no matter\n", "it ended with exit code 5"),
    "nothing": ("all is well\n", "it ended with exit code 5"),
    "binary": ("".join(map(chr, range(256))) * 9, "it ended with exit code 5"),
}


@pytest.mark.parametrize("name", LOGS)
def test_reason_of_a_death_is_found_in_the_log(tmp_path, name):
    text, words = LOGS[name]
    log = tmp_path / "log"
    log.write_bytes(text.encode("latin-1"))
    found = reason(log, 0, 5, vllm_server._KNOWN, TOKEN)
    assert words in found
    assert found.isprintable()
    assert len(found) < 1000
    assert PREFIX not in found


def test_a_start_fails_with_the_reason_and_the_log(tmp_path):
    launch = fake(tmp_path, log=LOGS["kv"][0], code=1)
    message = failure(launch)
    assert LOGS["kv"][1] in message
    assert str(launch.log) in message
    assert launch.log.read_text().endswith(LOGS["kv"][0])


@pytest.mark.parametrize(("number", "words"), [(9, "probably because memory ran out"), (7, "shared memory is full"), (11, "")])
def test_a_signal_is_a_reason(tmp_path, number, words):
    message = failure(fake(tmp_path, signal=number))
    assert f"killed by signal {number}" in message
    assert words in message


def test_reason_is_of_the_latest_start_and_hides_the_token(tmp_path):
    assert "first" in failure(fake(tmp_path, log="ValueError: first\n", code=1))
    message = failure(fake(tmp_path, log=f"KeyError: 'Bearer {TOKEN}'\n", code=1))
    assert "KeyError: 'Bearer ***'" in message
    assert "it ended with exit code 1" in failure(fake(tmp_path, code=1))


def test_reason_is_found_at_the_end_of_a_huge_log(tmp_path):
    noise = "ValueError: noise\n" + "x" * 2_000_000 + "\n"
    message = failure(fake(tmp_path, log=f"{noise}KeyError: {'long ' * 1000}\n", code=1))
    assert "KeyError: long long" in message
    assert len(message) < 1000
    assert "exit code 1" in failure(fake(tmp_path, log=noise, code=1))


def test_wrong_interpreter_or_model_says_what_to_type(tmp_path):
    launch = fake(tmp_path)
    for python in (tmp_path / "nowhere", tmp_path, tmp_path / "plan.json"):
        with pytest.raises(ValueError, match=r"no program at .*make install-vllm.*serving\.launch\.python"):
            asyncio.run(VllmServer(launch_of(tmp_path, python=python)).start())
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no Hugging Face folder: it has no config\.json"):
        asyncio.run(VllmServer(launch).start())
    (tmp_path / "model" / "config.json").touch()
    message = failure(launch_of(tmp_path, python=Path(sys.executable)))  # a real interpreter, without vLLM
    assert "make install-vllm" in message


def test_interpreter_that_cannot_be_run(tmp_path):
    launch = fake(tmp_path)
    launch.python.write_text("#!/nowhere/python\n")
    assert "exit code 127" in failure(launch)
    assert "cannot run" in launch.log.read_text()


def test_modules_of_the_working_directory_do_not_shadow(tmp_path, monkeypatch):
    launch = fake(tmp_path)
    (tmp_path / "vllm.py").write_text("print('shadowed')")
    monkeypatch.chdir(tmp_path)
    failure(launch_of(tmp_path, python=Path(sys.executable)))
    assert "shadowed" not in launch.log.read_text()


# restarts


@given(st.integers(0, 2000), st.floats(0.01, 10), st.floats(1, 10), st.floats(0.01, 1000))
def test_delay_grows_to_its_bound(n, first, factor, most):
    restarts = Restarts(first_delay_s=first, factor=factor, max_delay_s=most)
    exponent = min(math.log(first) + n * math.log(factor), math.log(most))
    assert restarts.delay(n) == pytest.approx(math.exp(exponent), rel=1e-9)
    assert restarts.delay(n) <= restarts.delay(n + 1) <= most


def test_budget_counts_a_window():
    restarts = Restarts(limit=3, window_s=100.0, first_delay_s=1.0, factor=2.0, max_delay_s=60.0)
    assert [restarts.next([float(i) for i in range(n)], 50.0) for n in range(4)] == [1.0, 2.0, 4.0, None]
    assert restarts.next([0.0, 10.0, 20.0], 99.0) is None
    assert restarts.next([0.0, 10.0, 20.0], 100.0) == 4.0  # the first is a window ago
    assert restarts.next([0.0, 10.0, 20.0], 1000.0) == 1.0
    assert Restarts(limit=0).next([], 0.0) is None


@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(1, 5))
def test_no_window_holds_more_restarts_than_the_budget(deaths, limit):
    restarts, times = Restarts(limit=limit, window_s=100.0), []
    for now in sorted(deaths):
        if restarts.next(times, now) is not None:
            times.append(now)
    assert all(later - earlier >= 100.0 for earlier, later in zip(times, times[limit:], strict=False))


# the real one


@pytest.mark.skipif(not REAL.exists(), reason="no .venv-vllm: `make install-vllm` makes one")
def test_real_server_starts_serves_and_ends_whole(tmp_path):
    tiny_model_folder(tmp_path / "model", head_dim=32, num_attention_heads=2, num_key_value_heads=2, hidden_size=64)
    launch = launch_of(tmp_path, python=REAL, start_timeout_s=200.0)
    auth = {"Authorization": f"Bearer {TOKEN}"}

    async def run():
        async with started(launch) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            family = descendants(server.pid)
            assert len(family) >= 3  # the API server, its engine, the engine's worker
            assert (await http.get("/weight_info")).status_code == 401
            assert (await http.get("/weight_info", headers=auth)).json() == {"weight_version": "default"}
            models = (await http.get("/v1/models", headers=auth)).json()["data"]
            assert [(model["id"], model["max_model_len"]) for model in models] == [("policy", 64)]
        assert not family & {process.pid for process in processes()}

    asyncio.run(run())
    assert TOKEN not in launch.log.read_text(errors="replace")
