"""One vLLM server on this host: its start, its death explained, its end."""

import asyncio
import contextlib
import os
import secrets
import signal
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from serving_bridge.supervise import KILL_S, Supervised, reason, reserved_port
from serving_bridge.supervise import Restarts as Restarts
from serving_bridge.vllm_launch import INSTALL, SEEDS, Launch, command, environment, write_site

_POLL_S = 0.1
_KNOWN = (
    (r"CPU Generator does not use offset", f"{SEEDS}: start it with --no-enable-chunked-prefill"),
    (
        r"larger than the available KV cache memory|No available memory for the cache blocks",
        "too little memory for the KV cache: lower serving.context_length or serving.slots, or raise "
        "VLLM_CPU_KVCACHE_SPACE in the environment (CPU; GiB) or --gpu-memory-utilization (GPU)",
    ),
    (r"User-specified max_model_len", "serving.context_length is more than the model's longest sequence"),
    (r"CUDA out of memory|Free memory on dev", "too little free GPU memory: lower serving.slots or --gpu-memory-utilization"),
    (r"No module named '?vllm\b|Failed to infer device type", f"its interpreter has no vLLM that fits: {INSTALL}"),
    (r"are not supported for now|does not recognize this arch", "this vLLM does not know the model's type: upgrade it"),
    (r"error: (unrecognized arg|argument|ambiguous)", "vLLM refuses an option: check serving.launch.extra_args"),
)


class ServerDied(Exception):
    """The server ended, or did not start in time; the message gives the reason and the log."""


@dataclass
class _Run:
    """A start of the server: its process, where its part of the log begins and, in the end, why it ended."""

    process: Supervised
    log_start: int
    reason: str | None = None


class VllmServer:
    """A server that can be started again after it ended. Use it from one event loop. `url` is valid from `start` on.

    Whatever happens to this process, the server ends with it. `grace_s`: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, launch: Launch, *, grace_s: float = 10.0):
        self.launch, self.url, self._grace_s = launch, "", grace_s
        self._run: _Run | None = None

    @property
    def running(self) -> bool:
        """True from the start of the process until it ends, healthy or not."""
        return self._run is not None and not self._run.process.ended()

    @property
    def pid(self) -> int | None:
        """The id of the supervisor and of its session, to which all processes of the latest start belong."""
        return None if self._run is None else self._run.process.pid

    async def start(self) -> None:
        """Returns once GET /health answers 200, on a port of its own each time.

        Raises ServerDied when it ended meanwhile or was ended after `start_timeout_s`, ValueError when the interpreter, the
        model or an extra argument is wrong, RuntimeError when it runs already.
        """
        if self.running:
            raise RuntimeError(f"the vLLM server at {self.url} runs already")
        await self.stop()
        with reserved_port() as port:
            run = self._spawn(port)
            try:
                async with asyncio.timeout(self.launch.start_timeout_s):
                    await self._health(run)
            except BaseException as error:
                await self.stop()
                if not isinstance(error, TimeoutError):
                    raise
                late = f"serving.launch.start_timeout_s = {self.launch.start_timeout_s:g} s"
                raise self._dead(f"it was not healthy within {late}") from None

    async def died(self) -> str:
        """Why the server ended, as soon as it has. Nothing of it is left then. RuntimeError when it was never started."""
        if (run := self._run) is None:
            raise RuntimeError("the vLLM server was not started")
        while not run.process.ended():
            await asyncio.sleep(_POLL_S)
        await self._clear(run)
        return run.reason or "it was stopped"

    async def stop(self) -> None:
        """Ends the server and all that it started: SIGTERM, SIGKILL after the grace period. Again and again if you like."""
        if (run := self._run) is None:
            return
        if not run.process.ended():
            run.reason = run.reason or "it was stopped"
        run.process.send(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s + 2 * KILL_S
        while not run.process.ended():
            if time.monotonic() > deadline:
                run.process.send(signal.SIGKILL)
            await asyncio.sleep(_POLL_S / 4)
        await self._clear(run)

    def _spawn(self, port: int) -> _Run:
        launch = self.launch
        if not (launch.python.is_file() and os.access(launch.python, os.X_OK)):
            raise ValueError(f"no program at {launch.python}: {INSTALL}")
        if not (launch.model / "config.json").is_file():
            raise ValueError(f"{launch.model} is no Hugging Face folder: it has no config.json")
        site = Path(tempfile.gettempdir(), f"vllm-{secrets.token_hex(6)}")
        words, env = command(launch, port), environment(launch, site)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        site.mkdir(mode=0o700)
        write_site(site)
        with launch.log.open("ab", buffering=0) as log:
            log.write(f"\n=== vLLM server {launch.name}, port {port}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n".encode())
            start = log.tell()
            process = Supervised(words, env, log, site, self._grace_s)
        self._run = _Run(process, start)
        self.url = f"http://127.0.0.1:{port}"
        return self._run

    async def _health(self, run: _Run) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False) as http:
            while True:
                if run.process.ended():
                    raise self._dead(await self.died())
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/health")).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)

    async def _clear(self, run: _Run) -> None:
        """Waits until nothing of an ended server is left, then finds the reason."""
        while not run.process.clear():
            await asyncio.sleep(_POLL_S / 4)
        if run.reason is None:
            run.reason = reason(self.launch.log, run.log_start, run.process.code or 0, _KNOWN, self.launch.token)

    def _dead(self, why: str) -> ServerDied:
        return ServerDied(f"the vLLM server {self.launch.name!r} did not start: {why}; its log is {self.launch.log}")
