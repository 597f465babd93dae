"""What a plan says: does it fit, what moves, how long it takes at best, what it costs. As a dict, and in words."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from gspo_jax.config_report import total_steps
from gspo_jax.parallel import STORE
from gspo_jax.plan.collectives import Stored, collectives, least_bytes, seconds
from gspo_jax.plan.compiling import Built, embedded
from gspo_jax.plan.flops import scored_minibatches, step_flops
from gspo_jax.plan.targets import RESERVE, Target
from gspo_jax.plan.traffic import memory_bytes, temporaries
from gspo_jax.policy import LOGITS_TOKENS
from gspo_jax.sections import Config
from serving_bridge.trees import leaves

DONATED = 0.95
"""Least part of the state that must be donated: else an update holds two states."""
GB = 1e9


def report(config: Config, built: Built, target: Target, price: float | None = None) -> dict[str, Any]:
    """Everything a plan knows, as JSON values; bytes are of the fullest device, seconds and FLOPs of one training step."""
    capacity, peaks = target.gpu.memory - RESERVE, built.peaks
    peak, donated = max(peaks.values()), built.donated >= DONATED
    trips = trip_counts(built)
    found = collectives(built.update.module, built.shape, trips)
    flops = step_flops(config, built.start, built.work)
    gpus = built.shape.devices
    bounds = {
        "compute": flops.computed / gpus / target.gpu.flops,
        "memory": memory_bytes(built.update.module, trips) / target.gpu.bandwidth,
        "links": sum(seconds(each, built.shape, target.gpu) for each in found),
    }
    slowest, total = max(bounds.values()), gpus_of(config, gpus)
    hours = total_steps(config) * slowest / 3600
    return {
        "fits": peak <= capacity and donated, "compiler": target.compiler, "model": config.model.base or config.model.source,
        "gpu": target.gpu.name, "gpus": gpus, "mesh": built.shape._asdict(), "peak_bytes": peak, "capacity_bytes": capacity,
        "reserve_bytes": RESERVE, "peaks": peaks, "memory": _memory(built), "donated": built.donated,
        "temporaries": [each._asdict() for each in temporaries(built.update.module)],
        "kernels": built.update.module.kernels(),
        "collectives": [each._asdict() | {"wire_bytes": each.wire} for each in found],
        "least_wire_bytes": least(config, built), "model_flops": flops.model, "computed_flops": flops.computed,
        "seconds": bounds, "seconds_roofline": slowest, "mfu_ceiling": flops.model / gpus / target.gpu.flops / slowest,
        "steps": total_steps(config), "gpu_hours": hours * total, "cost": None if price is None else hours * total * price,
        "compile_seconds": {each.name: each.seconds for each in built.programs},
        "micro_batches": built.work.micro, "tokens_per_step": built.work.tokens * built.work.minibatches,
    }  # fmt: skip


def gpus_of(config: Config, training: int) -> int:
    """GPUs of the whole run: those that train, those of a reference, those of vLLM."""
    topology = config.compute.topology
    return training + topology.gpus_for_ref + (0 if embedded(config) else topology.gpus_for_vllm)


def trip_counts(built: Built) -> tuple[int, int]:
    """How often the update's loops run whose counts its text does not tell: micro-batches of a minibatch, and the chunks of
    tokens whose logits exist at one time."""
    rows, length = built.work.batch.tokens.shape[-2:]
    rows = max(rows // built.shape.rows, 1)
    fewest, most = LOGITS_TOKENS
    width = max(1, min(length, min(most, max(fewest, rows * length // 8)) // rows))
    return built.work.micro, -(-built.work.longest // (width * built.shape.sequence))


def least(config: Config, built: Built) -> dict[str, float]:
    """`collectives.least_bytes` of a run: only what is split at rest is gathered, only what is trained is scattered."""
    start, mesh, work = built.start, built.shape, built.work
    wide = start.policy.dtype.itemsize
    sizes: dict[str, float] = {"twice": 0.0, "once": 0.0, "trained": 0.0}
    for tree, trained in ((start.params, True), (start.frozen or {}, False)):
        for path, leaf in leaves(tree):
            table = path in ("embedding", "head")
            numbers, first = _stored(leaf, mesh.tensor), jax.tree.leaves(leaf)[0].sharding.spec
            sizes["once" if table or first[:1] == (STORE,) else "twice"] += numbers * wide
            sizes["trained"] += trained * numbers * (4 if table else wide)
    rows, length = work.batch.tokens.shape[-2:]
    activations = rows / mesh.rows * length / mesh.sequence * start.policy.config.hidden_size * wide
    scored = scored_minibatches(config, work) * work.micro
    return least_bytes(Stored(**sizes), activations, mesh, micro=work.micro * work.minibatches, scored=scored,
                       layers=start.policy.config.num_hidden_layers)  # fmt: skip


def _stored(leaf: Any, tensor: int) -> float:
    """Numbers of a leaf that is split over `STORE`, of one device of `tensor`."""
    total = 0.0
    for part in jax.tree.leaves(leaf):
        spec = part.sharding.spec
        if STORE in spec:
            total += part.size / (tensor if "tensor" in spec else 1)
    return total


def _memory(built: Built) -> dict[str, int]:
    s = built.shares
    return {
        "frozen": s.frozen, "masters": s.masters, "moments": s.moments, "gradients": s.gradients,
        "activations_and_temporaries": max(built.update.temporaries - s.gradients, 0), "batch": s.batch,
        "donated": built.update.aliased, "reference": s.reference, "sampler_weights": s.sampler, "cache": s.cache,
    }  # fmt: skip


def words(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a report."""
    shape = " x ".join(f"{name} {size}" for name, size in found["mesh"].items() if size > 1) or "one device"
    yield f"{found['model']} on {found['gpus']} x {found['gpu']} ({shape}), compiled by {found['compiler']}"
    if "estimate" in found["compiler"]:
        yield "  the compiler for GPUs is not installed (make install-plan): memory and traffic are those of the CPU compiler"
    yield f"  tokens of a step {found['tokens_per_step']:,}, micro-batches of a minibatch {found['micro_batches']}"
    yield "memory of the fullest device"
    for name, size in found["memory"].items():
        if size:
            yield f"  {size / GB:9.2f} GB  {name.replace('_', ' ')}"
    for name, size in found["peaks"].items():
        yield f"  {size / GB:9.2f} GB  peak of {name}"
    yield f"  state donated: {100 * found['donated']:.1f} %" + (
        "" if found["donated"] >= DONATED else ": BROKEN, it is held twice"
    )
    yield "largest temporaries of the update, by source line"
    for each in found["temporaries"]:
        yield f"  {each['bytes'] / GB:9.3f} GB  {each['line']}  {each['shape']} x {each['number']}"
    if found["kernels"]:
        yield "kernels of its own in the update, by source line"
    for line, number in found["kernels"].items():
        yield f"  {number:9d}     {line}"
    yield from _traffic(found)
    yield from _time(found)
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    yield (
        f"{verdict}: peak {found['peak_bytes'] / GB:.2f} GB of {found['capacity_bytes'] / GB:.2f} GB "
        f"({found['reserve_bytes'] / GB:.2f} GB reserved)"
    )


def _traffic(found: Mapping[str, Any]) -> Iterator[str]:
    if found["collectives"]:
        yield "collectives of a step, per device"
    for each in found["collectives"]:
        axes = "+".join(each["axes"]) or f"groups of {each['devices']}"
        yield f"  {each['bytes'] / GB:9.2f} GB  {each['kind']} over {axes}, {each['times']} times"
    sent, least = sum(each["wire_bytes"] for each in found["collectives"]), sum(found["least_wire_bytes"].values())
    if sent or least:
        yield f"  sent {sent / GB:.2f} GB; the least for this mesh is {least / GB:.2f} GB"


def _time(found: Mapping[str, Any]) -> Iterator[str]:
    bounds = ", ".join(f"{name} {value:.3g} s" for name, value in found["seconds"].items())
    yield f"an update at best {found['seconds_roofline']:.3g} s ({bounds}); {found['model_flops']:.3g} model FLOPs"
    yield f"  MFU at most {100 * found['mfu_ceiling']:.1f} %; sampling comes on top"
    cost = "" if found["cost"] is None else f", {found['cost']:,.2f} at the price given"
    yield f"  {found['steps']} steps: {found['gpu_hours']:,.2f} GPU hours{cost}"


def summary(found: Mapping[str, Any]) -> str:
    """One line, for lists of tries."""
    return f"{'fits' if found['fits'] else 'no  '}  {found['peak_bytes'] / GB:7.2f} GB"
