"""A Llama of a few thousand weights, as a policy and as a Hugging Face folder, and trajectories to feed it."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers_tokenizer import tiny_tokenizer

from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.models import llama
from gspo_jax.policy import Policy, save_policy
from gspo_jax.sharding import Layout, layout_of
from gspo_jax.types import Batch, Params
from rollout.types import Group, Problem, Trajectory, Turn
from serving_bridge.weights import leaf_shape

VOCAB = 97


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of the tiny Llama: 2 layers, width 32, 4 query heads on 2 key heads."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "float32",
    } | overrides


def tiny_policy(seed: int = 0, *, remat: str = "none", dtype: Any = jnp.float32, **overrides: Any) -> tuple[Policy, Params]:
    """A policy and random float32 parameters, large enough that no distribution is flat and every layer matters."""
    config = llama.Config.model_validate(tiny_config(**overrides))
    table, kind = llama.weights(config), jnp.dtype(dtype)
    policy = Policy(Path("tiny"), "llama", config, llama.Model(config, kind, remat), table, kind)
    rng, params = np.random.default_rng(seed), {}
    for row in table:
        *parents, last = row.path.split("/")
        leaf = rng.standard_normal(leaf_shape(row, config.sizes())) * 0.25
        where = params
        for name in parents:
            where = where.setdefault(name, {})
        where[last] = jnp.asarray(1 + 0.2 * leaf if last == "scale" else leaf, jnp.float32)
    return policy, params


def tiny_model_folder(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """`path`, a complete Hugging Face folder: the tiny Llama in float32 and a chat tokenizer of the same vocabulary.

    `overrides` are fields of config.json.
    """
    tokenizer = tiny_tokenizer()
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = tiny_config(vocab_size=len(tokenizer), **ids) | overrides
    policy, params = tiny_policy(seed, **{k: v for k, v in config.items() if k not in ("architectures", "model_type", "dtype")})
    with tempfile.TemporaryDirectory() as side:
        (Path(side) / "config.json").write_text(json.dumps(config, indent=2))
        (Path(side) / "generation_config.json").write_text(json.dumps(ids))
        tokenizer.save_pretrained(side)
        save_policy(replace(policy, folder=Path(side)), params, path, dtype="float32")
    return path


def on(devices: int | MeshShape, policy: Policy | None = None) -> Layout:
    """A layout on so many devices along `fsdp`, or on a mesh; of the policy's leaves, if there is one."""
    shape = devices if isinstance(devices, MeshShape) else MeshShape(fsdp=devices)
    mesh = make_mesh(shape) if shape.devices > 1 else None
    return layout_of(mesh, policy.table if policy else (), policy.config.sizes() if policy else {})


def turn(prompt: Sequence[int], completion: Sequence[int], logprobs: Sequence[float] | None = None) -> Turn:
    """One recorded model call; log-probabilities that tell the tokens apart unless given."""
    if logprobs is None:
        logprobs = [-0.01 * (token + 1) for token in completion]
    return Turn(tuple(prompt), tuple(completion), tuple(logprobs), (0,) * len(completion), "stop")


def done(*turns: Turn, reward: float = 1.0, member: int = 0) -> Trajectory:
    """A finished trajectory."""
    return Trajectory(turns, reward, "done", member=member)


def void(*turns: Turn) -> Trajectory:
    """A failed one: no reward."""
    return Trajectory(turns, None, "void", reason="task app went away")


def group(*trajectories: Trajectory, seed: int = 0) -> Group:
    return Group(Problem(seed), trajectories)


def random_groups(seed: int, problems: int, members: int, *, prompt: int = 6, completion: int = 9) -> list[Group]:
    """Groups of single-turn trajectories with random prompts, lengths (1 to the given) and ids."""
    rng = np.random.default_rng(seed)

    def ids(longest: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, VOCAB, rng.integers(1, longest + 1)).tolist())

    out = []
    for p in range(problems):
        first = ids(prompt)
        out.append(group(*(done(turn(first, ids(completion)), member=m) for m in range(members)), seed=p))
    return out


def micro(batch: Batch, minibatch: int = 0, number: int = 0) -> Batch:
    """Micro-batch `[r t]` of a packed batch `[m u r t]`."""
    return Batch(*(None if x is None else np.asarray(x)[minibatch, number] for x in batch))


def by_completion(values: Any, batch: Batch) -> dict[tuple[int, ...], np.ndarray]:
    """`values` at the trained tokens of each trajectory of a micro-batch, by the ids it sampled."""
    number, tokens, found = np.asarray(batch.trajectory_ids), np.asarray(batch.tokens), np.asarray(values)
    return {tuple(tokens[number == i].tolist()): found[number == i] for i in range(1, number.max() + 1)}
