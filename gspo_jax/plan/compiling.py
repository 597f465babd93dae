"""A run's programs, compiled for devices that are not here, and what the compiler says of their memory."""

import time
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from gspo_jax import sampling
from gspo_jax.build import build_trainer
from gspo_jax.config import ConfigError
from gspo_jax.mesh import MeshShape, make_mesh, mesh_shape
from gspo_jax.plan.abstract import (
    Work,
    abstract_batch,
    abstract_start,
    abstract_state,
    device_bytes,
    on_first,
    placed,
    referenced,
    served,
    slots,
    work_of,
)
from gspo_jax.plan.hlo import Module, parse
from gspo_jax.plan.targets import Target
from gspo_jax.reference import Reference, reference_layout
from gspo_jax.sections import Config
from gspo_jax.start import Source, Start

GPU_OPTIONS = {"xla_gpu_autotune_level": 0}
"""There is no GPU to time kernels on; without trying to, compiling takes half as long and plans the same memory."""
CPU_OPTIONS = {"xla_backend_optimization_level": 0}
"""Nothing is run: machine code need not be fast, and memory is planned before it is made."""


class Program(NamedTuple):
    """A compiled program. Bytes are of one device."""

    name: str
    arguments: int
    outputs: int
    aliased: int
    """Of the outputs, those written over donated arguments."""
    temporaries: int
    module: Module
    seconds: float
    """To trace, lower and compile it."""

    @property
    def peak(self) -> int:
        """What is allocated while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class Shares(NamedTuple):
    """Bytes on the fullest device, outside any program's temporaries."""

    frozen: int
    masters: int
    moments: int
    gradients: int
    """Float32, of what is trained; part of the update's temporaries."""
    batch: int
    reference: int
    sampler: int
    """Weights of the embedded sampler."""
    cache: int
    """Its keys, values and states."""
    gathered: int
    """Float32 parameters whole on one device, on their way to the embedded sampler."""

    @property
    def resident(self) -> int:
        """What is there whichever program runs."""
        return self.frozen + self.masters + self.moments + self.reference + self.sampler + self.cache


class Built(NamedTuple):
    """Everything that was compiled for a config."""

    start: Start
    shape: MeshShape
    work: Work
    programs: tuple[Program, ...]
    shares: Shares
    donated: float
    """Part of the state that the update writes over."""
    overlap: bool
    """Whether the embedded sampler runs beside the update."""

    @property
    def update(self) -> Program:
        return self.programs[0]

    @property
    def peaks(self) -> dict[str, int]:
        """Most bytes on the fullest device, by what is going on."""
        s = self.shares
        held = {"update": s.frozen + s.masters + s.moments, "score": s.frozen + s.masters, "decode": s.sampler + s.cache}
        found = {p.name: p.peak + s.resident - held[p.name] for p in self.programs}
        if self.overlap:
            found["update"] += sum(p.temporaries for p in self.programs if p.name == "decode")
        if s.gathered:
            found["publish"] = s.resident + s.gathered + s.sampler  # the old weights serve until the new ones are there
        return found


def embedded(config: Config) -> bool:
    """Whether the run samples on the devices that train."""
    return config.serving.engine != "vllm"


class Described(NamedTuple):
    """What is known before anything is compiled."""

    mesh: Mesh
    start: Start
    reference: Reference | None
    work: Work


def describe(config: Config, source: Source, target: Target) -> Described:
    """The run as shapes in their places. Raises ConfigError, WeightError for what the trainer would refuse."""
    mesh = make_mesh(mesh_shape(config, len(target.devices)), target.devices)
    start = abstract_start(config, mesh, source)
    reference = _reference(config, start, target)
    return Described(mesh, start, reference, work_of(config, start, reference))


def compile_run(config: Config, source: Source, target: Target, *, only_update: bool = False) -> Built:
    """Compiles the learner's update, the pass that scores a batch, and the embedded sampler's decode step, if there is one.

    `only_update`: just the first, which is the largest. Errors as `describe`.
    """
    mesh, start, reference, work = describe(config, source, target)
    with jax.set_mesh(mesh):
        trainer = build_trainer(config, start, lambda *_: None)
        state, batch = abstract_state(trainer, start, mesh), abstract_batch(config, start, mesh, work)
        programs = [compiled("update", trainer.compiled(state), target, state, batch, start.frozen)]
        if not only_update:
            whole = jax.eval_shape(start.whole, start.params, start.frozen)
            unanswered = batch._replace(reference_logprobs=None)
            programs.append(compiled("score", trainer.score, target, placed(whole, start.layout, mesh), unanswered))
    shares = _shares(config, start, mesh, state, batch, reference)
    if embedded(config) and not only_update:
        programs.append(_decode(config, start, mesh, target))
    donated = programs[0].aliased / device_bytes(state)
    return Built(start, start.layout.shape, work, tuple(programs), shares, donated, config.rollout.max_staleness > 0)


def compiled(name: str, function: Any, target: Target, *args: Any) -> Program:
    """`function`, jitted, compiled for the target and the shapes of `args` in their places."""
    began = time.monotonic()
    options = GPU_OPTIONS if target.platforms else CPU_OPTIONS
    lowered = function.trace(*args).lower(lowering_platforms=target.platforms)
    found = lowered.compile(compiler_options=options)
    memory = found.memory_analysis()
    return Program(
        name, memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes,
        memory.temp_size_in_bytes, parse(found.as_text()), time.monotonic() - began,
    )  # fmt: skip


def _reference(config: Config, start: Start, target: Target) -> Reference | None:
    if config.algorithm.kl_beta <= 0:
        return None

    def unused(_: Any) -> Any:
        raise AssertionError("a plan scores nothing")

    wanted = config.compute.topology.gpus_for_ref
    if wanted and len(target.devices) < start.layout.shape.devices + wanted:
        raise ConfigError("config", [f"compute.topology.gpus_for_ref: {wanted} devices more than the target has"])
    return Reference(unused, reference_layout(config, start, target.devices))


def _shares(config: Config, start: Start, mesh: Mesh, state: Any, batch: Any, reference: Reference | None) -> Shares:
    kept, gathered, sampler, cache = 0, 0, 0, 0
    if reference is not None and reference.layout is start.layout and not (start.frozen is not None and start.fresh):
        kept = device_bytes(placed(referenced(start), start.layout, mesh))
    if embedded(config):
        sampler = device_bytes(on_first(served(start), mesh))
        cache = device_bytes(on_first(slots(config, start.policy), mesh))
        if mesh.size > 1:
            gathered = device_bytes(on_first(start.params, mesh))
    masters = device_bytes(state.params)
    return Shares(device_bytes(start.frozen), masters, device_bytes(state.opt_state), masters, device_bytes(batch), kept,
                  sampler, cache, gathered)  # fmt: skip


def _decode(config: Config, start: Start, mesh: Mesh, target: Target) -> Program:
    count = config.serving.slots
    tokens = jax.ShapeDtypeStruct((count,), jax.numpy.int32)
    first = on_first((served(start), slots(config, start.policy), tokens, tokens), mesh)
    alone = Mesh(mesh.devices.reshape(-1)[:1], "x")
    with jax.set_mesh(alone):
        return compiled("decode", jax.jit(partial(sampling.decode, start.policy), donate_argnums=1), target, *first)
