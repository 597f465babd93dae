"""How the bytes of a version travel: shared memory on one host, a TCP stream, NCCL between GPUs, an adapter's folder."""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from serving_bridge.nccl import NcclSender
from serving_bridge.nccl_library import NcclError
from serving_bridge.nccl_plan import Tensor
from serving_bridge.publish import forget_update, repeated, together, update_weights
from serving_bridge.stage import Staged
from serving_bridge.tcp import WeightSender
from serving_bridge.vllm_client import ServerError, VllmClient

CLOSE_S = 10.0


class _Plain:
    """What a transport that shares nothing between transfers has to do for them: nothing."""

    async def connect(self, client: VllmClient, timeout_s: float) -> None:
        pass

    def offer(self, staged: Staged) -> None:
        pass

    def vacate(self, staged: Staged) -> None:
        pass

    async def aclose(self) -> None:
        pass


class _Plugin(_Plain):
    """What the transports of `gspo_vllm` share: one engine there, told where the bytes are."""

    backend = "gspo"

    async def connect(self, client: VllmClient, timeout_s: float) -> None:
        await client.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=timeout_s)

    def where(self, staged: Staged, timeout_s: float) -> dict[str, Any]:
        """The part of `update_info` that says where the bytes are."""
        raise NotImplementedError

    async def transfer(self, client: VllmClient, staged: Staged, timeout_s: float, again: bool = False) -> None:
        info = {"id": staged.id, "count": len(staged.names), **self.where(staged, timeout_s)}
        if again:
            await forget_update(client)
        await update_weights(client, info, staged.id, timeout_s)


class SharedMemory(_Plugin):
    """Workers on this host map the staged file: nothing is copied on the way. Needs `gspo_vllm` in the server.

    `verify_every`: every how many versions the workers compare a checksum of all bytes; 0: never.
    """

    def __init__(self, verify_every: int = 0):
        self._verify_every, self._crcs = verify_every, dict[str, int]()

    def where(self, staged: Staged, timeout_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {"file": str(staged.path)}
        return found | {"crc": self._crcs[staged.id]} if staged.id in self._crcs else found

    def offer(self, staged: Staged) -> None:
        due = self._verify_every > 0 and staged.version % self._verify_every == 0
        self._crcs = {staged.id: checksum(staged)} if due else {}


class Stream(_Plugin):
    """Workers on any host read a TCP stream of checked bytes from this process. Needs `gspo_vllm` in the server.

    `token`: what both sides prove to know. `host`: address of this machine at which workers reach it. `delta`: a worker that
    has the version before is sent what changed.
    """

    def __init__(self, token: str, host: str, *, delta: bool):
        self.sender, self._delta = WeightSender(token, host), delta
        self._offered: Staged | None = None

    def where(self, staged: Staged, timeout_s: float) -> dict[str, Any]:
        return {"address": self.sender.address, "delta": self._delta, "timeout_s": timeout_s}

    def offer(self, staged: Staged) -> None:
        self.sender.offer(staged, self._offered if self._delta else None)
        self._offered = staged

    def vacate(self, staged: Staged) -> None:
        self.sender.release(staged)

    async def aclose(self) -> None:
        with suppress(TimeoutError):
            await asyncio.to_thread(self.sender.close, CLOSE_S)


class Nccl(_Plain):
    """vLLM's own engine for GPUs, with this process as the communicator's first rank; one communicator for each server.

    `arrays(staged)` yields `(name, device array)` of a version in the order of `tensors`; `pack(arrays)` joins the bytes of
    several on the device.
    """

    backend = "nccl"

    def __init__(
        self,
        arrays: Callable[[Staged], Iterable[tuple[str, Any]]],
        pack: Callable[[list[Any]], Any],
        tensors: Iterable[Tensor],
        *,
        sender: Callable[[Callable[[list[Any]], Any]], NcclSender] = NcclSender,
    ):
        self._arrays, self._pack, self._make = arrays, pack, sender
        self._tensors = list(tensors)
        self._senders: dict[VllmClient, NcclSender] = {}

    async def connect(self, client: VllmClient, timeout_s: float) -> None:
        workers = int((await client.table("/get_world_size"))["world_size"])
        for old in [each for each in self._senders if each is client or each.closed]:  # a server that was started again
            await self._drop(old)
        sender = self._senders[client] = self._make(self._pack)
        body = {"init_info": sender.init_info(workers)}
        post = client.post("/init_weight_transfer_engine", body, timeout_s=timeout_s)
        await self._both(client, sender, post, lambda: sender.connect(timeout_s))

    async def transfer(self, client: VllmClient, staged: Staged, timeout_s: float, again: bool = False) -> None:
        sender = self._senders[client]
        try:
            info = sender.update_info(self._tensors)
        except NcclError as error:
            raise ServerError(f"{client.url}: {error}", gone=True) from error

        async def send() -> None:
            await self._both(client, sender, None, lambda: sender.send(self._groups(sender, staged), timeout_s))

        await update_weights(client, info, staged.id, timeout_s, alongside=send)

    async def _both(self, client: VllmClient, sender: NcclSender, post: Any, work: Callable[[], Any]) -> None:
        """`work` in a thread, beside `post` if there is one; whatever fails or is cancelled ends the communicator."""
        try:
            thread = asyncio.to_thread(work)
            await (thread if post is None else together(post, thread))
        except NcclError as error:
            raise ServerError(f"{client.url}: {error}", gone=True) from error
        except BaseException as error:
            sender.abort(f"the server's side of it failed ({str(error) or type(error).__name__})")
            raise

    def _groups(self, sender: NcclSender, staged: Staged) -> Iterator[list[tuple[str, Any]]]:
        arrays = iter(self._arrays(staged))
        for chunk in sender.plan:
            yield [next(arrays) for _ in chunk]

    async def _drop(self, client: VllmClient) -> None:
        await asyncio.to_thread(self._senders.pop(client).close)

    async def aclose(self) -> None:
        for client in list(self._senders):
            await self._drop(client)


class LoraFolder(_Plain):
    """The server loads an adapter from the staged PEFT folder, under the name that requests ask for."""

    backend = ""

    def __init__(self, name: str):
        self._name = name

    async def transfer(self, client: VllmClient, staged: Staged, timeout_s: float, again: bool = False) -> None:
        body = {"lora_name": self._name, "lora_path": str(staged.path.parent), "load_inplace": True}
        await repeated(lambda: client.post("/v1/load_lora_adapter", body, timeout_s=timeout_s))
        await repeated(lambda: client.post("/update_weight_version", {"new_version": staged.id}))


def checksum(staged: Staged) -> int:
    """crc32 of the tensors' bytes, in the order of the file."""
    file = np.memmap(staged.path, np.uint8, "r")
    return zlib.crc32(file[file.size - staged.nbytes :])
