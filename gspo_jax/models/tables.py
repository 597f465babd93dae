"""Weight tables of decoders: what `decoder` calls its weights beside what Hugging Face checkpoints call them."""

from collections.abc import Callable, Collection
from dataclasses import replace
from types import ModuleType

from gspo_jax.models.settings import Settings
from gspo_jax.models.stages import stage_name, stages
from serving_bridge.convert import Weight

type Rows = list[tuple[str, str, str] | tuple[str, str, str, tuple[str, int]]]
"""`(Flax path in the layer, Hugging Face name in the layer, layout[, part])` of each weight of a layer."""

SPELLINGS = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)
"""How names of the body and of the head begin: in text checkpoints, in multimodal ones, in older multimodal ones."""


def table_of(module: ModuleType, config: Settings, names: Collection[str]) -> tuple[Weight, ...]:
    """An architecture's weight table in the spelling of a checkpoint that has tensors of these `names` (none: its own)."""
    options = {}
    if names and any(map(config.routes, config.kinds)):
        options["fused"] = any(name.endswith(".experts.gate_up_proj") for name in names)
    table = module.weights(config, **options)
    for body, head in SPELLINGS:
        if f"{body}embed_tokens.weight" in names:
            return tuple(replace(row, name=_spelled(row.name, body, head)) for row in table)
    return table


def _spelled(name: str, body: str, head: str) -> str:
    for usual, found in zip(SPELLINGS[0], (body, head), strict=True):
        if name.startswith(usual):
            return found + name.removeprefix(usual)
    return name


def decoder_table(config: Settings, rows: Callable[[Settings, str], Rows]) -> tuple[Weight, ...]:
    """The weight table: embedding, head, final norm, and what `rows` says of a layer of each kind."""
    table = [Weight("embedding", "model.embed_tokens.weight", "v d -> v d")]
    if not config.tie_word_embeddings:
        table.append(Weight("head", "lm_head.weight", "v d -> v d"))
    table.append(Weight("norm/scale", "model.norm.weight", "d -> d"))
    plan = stages(config.kinds)
    for i, stage in enumerate(plan):
        for place, kind in enumerate(stage.unit):
            inside = "" if len(stage.unit) == 1 else f"block{place}/"
            numbers = stage.numbers(place) if len(plan) > 1 or inside else None
            for path, name, layout, *part in rows(config, kind):
                full = f"{stage_name(plan, i)}/{inside}{path}"
                table.append(Weight(full, f"model.layers.{{l}}.{name}", layout, numbers, *part))
    return tuple(table)


def attention_rows(config: Settings, *, gated: bool = False) -> Rows:
    """Weights of `Attention` under the names that all these checkpoints use."""
    bias, out_bias = config.biases
    rows = []
    for path, (short, axes) in {
        "query": ("q", "n c h" if gated else "n h"),
        "key": ("k", "k h"),
        "value": ("v", "k h"),
    }.items():
        rows.append((f"attention/{path}/kernel", f"self_attn.{short}_proj.weight", f"({axes}) d -> d {axes}"))
        if bias:
            rows.append((f"attention/{path}/bias", f"self_attn.{short}_proj.bias", f"({axes}) -> {axes}"))
        if config.qk_norm and path != "value":
            rows.append((f"attention/{path}_norm/scale", f"self_attn.{short}_norm.weight", "h -> h"))
    rows.append(("attention/out/kernel", "self_attn.o_proj.weight", "d (n h) -> n h d"))
    if out_bias:
        rows.append(("attention/out/bias", "self_attn.o_proj.bias", "d -> d"))
    return rows


def mlp_rows(path: str = "mlp", name: str = "mlp", width: str = "f", *, bias: bool = False) -> Rows:
    """Weights of `MLP`."""
    rows = []
    for part, layout, out in (("gate", "f d -> d f", "f"), ("up", "f d -> d f", "f"), ("down", "d f -> f d", "d")):
        rows.append((f"{path}/{part}/kernel", f"{name}.{part}_proj.weight", layout.replace("f", width)))
        if bias:
            rows.append((f"{path}/{part}/bias", f"{name}.{part}_proj.bias", f"{out} -> {out}".replace("f", width)))
    return rows


def norm_rows() -> Rows:
    """The two norms of a pre-norm layer."""
    return [("attention_norm/scale", "input_layernorm.weight", "d -> d"),
            ("mlp_norm/scale", "post_attention_layernorm.weight", "d -> d")]  # fmt: skip
