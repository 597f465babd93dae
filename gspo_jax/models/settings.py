"""What the configurations of all architectures share. A setting that we do not compute is refused by name, never ignored."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from gspo_jax.models.rotary import Rope, rope

HARMLESS = (
    "_*", "architectures", "auto_map", "dtype", "*_dropout", "*_token_id", "*_token_index", "id2label", "initializer_range",
    "is_decoder", "is_encoder_decoder", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "max_sequence_length",
    "max_window_layers", "model_name", "model_type", "model_max_length", "num_labels", "output_*", "pretraining_tp",
    "problem_type", "router_aux_loss_coef", "task_specific_params", "tie_encoder_decoder", "tokenizer_class", "torch_dtype",
    "transformers*", "unsloth*", "use_cache", "cache_implementation", "return_dict",
    # Generation settings that older files repeat.
    "max_length", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams",
    "num_beam_groups", "num_return_sequences",
)  # fmt: skip
"""Keys of a config.json that change nothing we compute (dropout is 0 in log-probabilities)."""


class Settings(BaseModel):
    """The fields of a Hugging Face `config.json` that change what is computed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    ignored: ClassVar[tuple[str, ...]] = ()
    """Further harmless keys of an architecture."""
    untrained: ClassVar[tuple[str, ...]] = ()
    """Glob patterns of tensors that are carried from checkpoint to export untouched (vision towers)."""
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0
    """1 where the checkpoint stores norm scales minus one."""
    partial_rotary: ClassVar[bool] = False
    """Whether only `partial_rotary_factor` of each head may be rotated."""
    layer_names: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Which `layer_types` are computed."""
    recurrent: ClassVar[bool] = False
    """Whether some layers carry a state along the row, which completions of one shared prompt cannot branch from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    use_sliding_window: bool = False
    layer_types: tuple[str, ...] | None = None
    is_causal: bool = True

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, raw: dict[str, Any]) -> dict[str, Any]:
        found = cls.spell({k: v for k, v in _text_part(raw).items() if v is not None})
        for name in sorted(found.keys() - cls.model_fields.keys()):
            if found[name] not in (False, [], {}) and not any(fnmatchcase(name, glob) for glob in (*HARMLESS, *cls.ignored)):
                raise ValueError(f"{name}={found[name]!r} is not supported by this architecture")
        return found

    @classmethod
    def spell(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The config with older spellings replaced and what follows from other fields filled in."""
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
        raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        assumed = {
            "original_max_position_embeddings": raw.get("max_position_embeddings"),
            "rope_theta": raw.pop("rope_theta", 1e4),
        }
        raw["rope_parameters"] = assumed | (raw.pop("rope_scaling", None) or raw.get("rope_parameters") or {})
        return raw

    @model_validator(mode="after")
    def _supported(self) -> "Settings":
        if self.hidden_act not in self.activations:
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; supported: {', '.join(self.activations)}")
        if not self.is_causal:
            raise ValueError("is_causal=False is not supported; every token sees earlier ones only")
        parts = [self.rope_parameters, *(x for x in self.rope_parameters.values() if isinstance(x, dict))]
        if not self.partial_rotary and any(part.get("partial_rotary_factor", 1) != 1 for part in parts):
            raise ValueError(f"partial_rotary_factor in rope_parameters={self.rope_parameters} is not supported")
        for name, size in (("num_hidden_layers", self.num_hidden_layers), ("head_dim", self.head_dim)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        self._check_layers()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        self.check()
        return self

    def _check_layers(self) -> None:
        types = self.layer_types or ()
        known = self.layer_names + (("linear_attention",) if self.recurrent else ())
        strange = sorted({kind for kind in types if kind not in known})
        if strange:
            raise ValueError(f"layer_types with {', '.join(strange)} are not supported; supported: {', '.join(known)}")
        if types and len(types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers={self.num_hidden_layers}")
        given = self.sliding_window is not None and (
            self.use_sliding_window or "use_sliding_window" not in self.model_fields_set
        )
        if given and "sliding_attention" not in self.layer_names:
            raise ValueError(f"sliding_window={self.sliding_window} is not supported by this architecture")
        if "sliding_attention" in types and not any(self.sliding):
            raise ValueError(f"layer_types has sliding_attention, but sliding_window={self.sliding_window} is not in use")

    def check(self) -> None:
        """ValueError naming a setting of this architecture that is not supported."""
        self.rope()

    def rope(self) -> Rope:
        """The rotary embedding of (full) attention."""
        return rope(self.head_dim, self.rope_parameters)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each layer is, for the stack: layers of one kind have the same weights' shapes."""
        return ("attention",) * self.num_hidden_layers

    def remembers(self, kind: str) -> str:
        """Which part of the cache a layer of this kind uses: keys | state."""
        return "keys"

    def routes(self, kind: str) -> bool:
        """Whether a layer of this kind has experts."""
        return False

    @property
    def sliding(self) -> tuple[bool, ...]:
        """Which layers see only `sliding_window` positions."""
        return (False,) * self.num_hidden_layers

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether the projections to query, key and value have biases, and whether the one back has."""
        return self.attention_bias, self.attention_bias

    @property
    def attention_scale(self) -> float:
        """Factor on query-key products."""
        return self.head_dim**-0.5

    @property
    def embedding_scale(self) -> float:
        """Factor on token embeddings."""
        return 1.0

    def sizes(self) -> dict[str, int]:
        """Length of every axis letter of the weight table."""
        return {
            "v": self.vocab_size, "d": self.hidden_size, "f": self.intermediate_size, "l": self.num_hidden_layers,
            "n": self.num_attention_heads, "k": self.num_key_value_heads, "h": self.head_dim,
        }  # fmt: skip


def _text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own config: the inner one of a multimodal checkpoint."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(raw)
    tied, inside = raw.get("tie_word_embeddings"), inner.get("tie_word_embeddings")
    if None not in (tied, inside) and tied != inside:
        raise ValueError(f"tie_word_embeddings={tied} is not supported beside tie_word_embeddings={inside} in text_config")
    outer = {k: raw[k] for k in ("tie_word_embeddings", "quantization_config") if raw.get(k) is not None}
    return {**inner, **outer}
