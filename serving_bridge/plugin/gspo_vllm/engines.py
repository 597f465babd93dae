"""The weight-transfer engine `gspo` of a vLLM worker: maps a file of this host, or reads a stream from the trainer.

Loads through vLLM's layer-wise reload, so fused, packed, quantized and tied weights are rebuilt as at start. An update whose
id was applied already is not applied again: a request that is repeated after a lost reply changes nothing.
"""

import json
import mmap
import os
import struct
import zlib
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from .guard import TOKEN
from .wire import Mirror, receive

SHM = "GSPO_VLLM_SHM"
"""Environment variable with the only folder from which files are mapped."""
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
MAX_HEADER = 64 * 2**20


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """One version: `id` names it, `count` is how many tensors it has. Either `file` or `address` says where it is."""

    id: str
    count: int
    file: str = ""
    """A safetensors file under the folder of GSPO_VLLM_SHM."""
    crc: "int | None" = None
    """crc32 of its tensors' bytes, if it is to be compared."""
    address: str = ""
    """host:port of the trainer."""
    delta: bool = False
    """Keep a copy of all weights on the host, so that the trainer need only send what changed."""
    timeout_s: float = 600.0


class Engine(WeightTransferEngine):
    """Each update whole, and once."""

    init_info_cls = InitInfo
    update_info_cls = Update

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._applied = None  # id of the last update that was loaded whole
        self._open = False
        self._mirror = Mirror()

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        pass  # the reload begins when the bytes are there: an update that is repeated or refused leaves the model as it is

    def update_weights(self, update_info):
        """Load one update whole. Raises when anything is missing; the update must then be sent again, whole."""
        update = self.parse_update_info(update_info)
        if update.id == self._applied:
            return
        self._applied = None
        self.receive_weights(update)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._applied = update.id

    def receive_weights(self, update):
        tensors = self._mapped(update) if update.file else self._streamed(update)
        initialize_layerwise_reload(self.model)
        self._open = True
        try:
            with torch.no_grad():
                count = 0
                for group in tensors:
                    count += len(group)
                    self.model.load_weights((name, tensor.to(self.device)) for name, tensor in group)
                if count != update.count:
                    raise ValueError(f"{count} tensors arrived, the trainer sent {update.count}")
                require_loaded(self.model)
        except BaseException:
            self.finish_weight_update()  # what was buffered of this update must not count towards the next one
            raise

    def finish_weight_update(self):
        if self._open:
            self._open = False
            finalize_layerwise_reload(self.model, self.model_config)
            with torch.no_grad():
                repack_tied(self.model)

    def shutdown(self):
        pass

    def _mapped(self, update):
        return [mapped(update.file, update.crc)]

    def _streamed(self, update):
        """The tensors of one bucket after another."""
        if not update.delta:
            self._mirror = Mirror()  # gives its memory back
        mirror = self._mirror if update.delta else None
        receiver = receive(update.address, os.environ.get(TOKEN, ""), update.id, mirror, timeout_s=update.timeout_s)
        return (
            [
                (tensor.name, torch.from_numpy(array).view(DTYPES[tensor.dtype]).view(tensor.shape))
                for tensor, array in bucket.views()
            ]
            for bucket in receiver.buckets()
        )


def require_loaded(model):
    """ValueError naming layers that lack weights. Call between the last tensor and the end of a reload."""
    missing, loaded = {}, set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        kept = info.kernel_tensors[0] if info.kernel_tensors else layer._parameters
        # A fused layer counts what it got (q and k, but no v); others may be padded, and are short of that.
        short = isinstance(layer, LinearBase) and info.can_load() and info.load_numel < info.load_numel_total
        if not info.can_load() or (info.load_numel > 0 and not short):
            loaded.update(map(id, kept.values()))
        elif layer._parameters and not is_deferred_attention_layer(layer):
            missing[name] = set(map(id, kept.values()))
    names = [name for name, parameters in missing.items() if not parameters <= loaded]  # a tied head gets its embedding's
    if names:
        raise ValueError(f"{len(names)} layers did not get all their weights, the first {names[0]}")


def repack_tied(model):
    """On the CPU a linear layer computes with a packed copy of its weight: pack again where the weight is another layer's."""
    seen = set()
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if not isinstance(weight, torch.nn.Parameter) or weight.device.type != "cpu" or not weight.numel():
            continue
        if id(weight) in seen and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
        seen.add(id(weight))


def mapped(file, crc=None):
    """`[(name, tensor)]` of a safetensors file under $GSPO_VLLM_SHM; the tensors are views of the mapped file.

    ValueError for other files, and when the crc32 of all tensors' bytes is another than `crc`.
    """
    folder = os.environ.get(SHM, "")
    if not folder:
        raise ValueError(f"{SHM} is not set: this server maps no files")
    path = os.path.realpath(file)
    if not path.startswith(os.path.realpath(folder) + os.sep) or not path.endswith(".safetensors"):
        raise ValueError(f"{file!r} must be a .safetensors file under {SHM} = {folder}")
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        view = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    (size,) = struct.unpack("<Q", view[:8])
    if size > min(MAX_HEADER, len(view) - 8):
        raise ValueError(f"{file} is no safetensors file: a header of {size} bytes in {len(view)}")
    head = json.loads(view[8 : 8 + size])
    if crc is not None and (found := zlib.crc32(memoryview(view)[8 + size :])) != crc:
        raise ValueError(f"{file}: the crc32 of its tensors is {found:08x}, the trainer's {crc:08x}")
    data = torch.frombuffer(view, dtype=torch.uint8)[8 + size :]
    return [(name, _view(data, name, entry)) for name, entry in head.items() if name != "__metadata__"]


def _view(data, name, entry):
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= data.numel():
        raise ValueError(f"{name}: bytes {start} to {end} of {data.numel()}")
    return data[start:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
