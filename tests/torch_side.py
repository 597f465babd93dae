"""The other side of the comparisons with transformers and torch; runs in an environment of its own (`make torch`).

python tests/torch_side.py make OUT         tiny random checkpoints of CASES, each with golden.npz and digests.json; beside
                                            those of ADAPTED an adapter that peft made, in NAME_peft
python tests/torch_side.py score FOLDER...  per folder, of a model or an adapter: golden.npz, digests.json, and loading.json
                                            (keys that do not fit); adapters saved again by peft, in again/
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path

NO_TORCH = 77
"""Exit code where torch or transformers is missing."""

SMALL = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_conv_kernel_dim": 4}  # fmt: skip
SLIDE, FULL, STATE = "sliding_attention", "full_attention", "linear_attention"
GEMMA = {"num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 24}
GEMMA_ROPE = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              SLIDE: {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14, "model_type": "siglip_vision_model"}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
          "num_position_embeddings": 16}  # fmt: skip
TOKENS = {"image_token_id": 128, "video_token_id": 129, "vision_start_token_id": 126, "vision_end_token_id": 127}

CASES = {
    "llama_biases_llama3": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama_tied_yarn": ("llama", {"tie_word_embeddings": True, "rope_parameters": YARN | {"beta_fast": 16.0, "mscale": 0.7,
                                                                                         "mscale_all_dim": 0.5}}),
    "llama_linear_no_groups": ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4, "head_dim": 8}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDE, FULL, SLIDE]}),
    "qwen2_upper_windows_yarn": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
                                           "tie_word_embeddings": True, "rope_parameters": YARN | {"truncate": False}}),
    "qwen3_biases_windows": ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9,
                                       "layer_types": [FULL, SLIDE, SLIDE], "rope_parameters": LINEAR}),
    "qwen3_tied_yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen3_moe_mixed": ("qwen3_moe", EXPERTS | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3],
                                                "norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe_windows": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 8,
                                                  "mlp_only_layers": [0], "tie_word_embeddings": True}),
    "qwen3_moe_sparse": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_5_pattern": ("qwen3_5_text", DELTA | {"num_hidden_layers": 5, "attention_bias": True,
                                                 "layer_types": [STATE, FULL, STATE, STATE, FULL]}),
    "qwen3_5_images": ("qwen3_5", DELTA | {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3_5_moe_pattern": ("qwen3_5_moe_text", DELTA | EXPERTS | {"shared_expert_intermediate_size": 20,
                                                                   "layer_types": [FULL, STATE, STATE]}),
    "qwen3_5_moe_images": ("qwen3_5_moe", DELTA | EXPERTS | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 20}),
    "gemma3_biases": ("gemma3_text", GEMMA | {"attention_bias": True, "rope_parameters": GEMMA_ROPE}),
    "gemma3_untied": ("gemma3_text", GEMMA | {"tie_word_embeddings": False, "num_hidden_layers": 3,
                                              "layer_types": [FULL, SLIDE, FULL]}),
    "gemma3_images": ("gemma3", GEMMA | {"rope_parameters": GEMMA_ROPE}),
}  # fmt: skip
"""By name: model_type, and what differs from SMALL."""

ADAPTED = {
    "llama_biases_llama3": {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 5, "use_rslora": True},
    "qwen3_moe_mixed": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 4, "lora_alpha": 12},
    "qwen3_moe_sparse": {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"], "r": 2, "lora_alpha": 3},
    "qwen3_5_pattern": {"target_modules": "all-linear", "r": 2, "lora_alpha": 1},
    "qwen3_5_moe_pattern": {"target_modules": "all-linear", "r": 2, "lora_alpha": 4},
    "gemma3_biases": {"target_modules": "all-linear", "r": 1, "lora_alpha": 3},
    "gemma3_images": {"target_modules": r".*language_model.*\.(q_proj|down_proj)", "r": 2, "lora_alpha": 8},
}
"""By name of a case: an adapter on it."""


def config_of(kind: str, changes: dict):
    """The transformers configuration of a case."""
    from transformers import AutoConfig

    text = SMALL | changes
    if kind == "gemma3":
        tokens = {"boi_token_index": 126, "eoi_token_index": 127, "image_token_index": 128, "mm_tokens_per_image": 1}
        return AutoConfig.for_model(kind, text_config=text, vision_config=SIGLIP, **tokens)
    if kind in ("qwen3_5", "qwen3_5_moe"):
        tied = text.get("tie_word_embeddings", False)
        return AutoConfig.for_model(kind, text_config=text, vision_config=VISION, tie_word_embeddings=tied, **TOKENS)
    return AutoConfig.for_model(kind, **text)


def model_class(config):
    """The class that has all of a checkpoint's tensors."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def make(out: Path) -> None:
    """Random weights large enough that every part of the model matters."""
    import torch

    for number, (name, (kind, changes)) in enumerate(CASES.items()):
        torch.manual_seed(number)
        config = config_of(kind, changes)
        model = model_class(config).from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.15 * torch.randn_like(parameter)
        model.save_pretrained(out / name)
        record(model, out / name)
        if name in ADAPTED:
            adapt(model, out / name, ADAPTED[name])


def adapt(model, folder: Path, settings: dict) -> None:
    """An adapter of random numbers, made and saved by peft."""
    import torch
    from peft import LoraConfig, get_peft_model

    model.name_or_path = str(folder)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    out = folder.with_name(f"{folder.name}_peft")
    adapted.save_pretrained(out)
    record(adapted, out)


def score(folder: Path) -> None:
    """What transformers and peft make of a folder that we wrote, computed in float32."""
    import torch
    from transformers import AutoConfig

    if (folder / "adapter_config.json").exists():
        score_adapter(folder)
        return
    config = AutoConfig.from_pretrained(folder)
    model, info = model_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    (folder / "loading.json").write_text(json.dumps({key: sorted(map(str, value)) for key, value in info.items() if value}))
    record(model.eval(), folder)


def score_adapter(folder: Path) -> None:
    """A PEFT folder on the model it names; what peft read is written once more."""
    import torch
    from peft import PeftModel
    from transformers import AutoConfig

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    kind = model_class(AutoConfig.from_pretrained(base))
    model = kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, folder).eval()
    told = [str(w.message) for w in caught if "adapter" in str(w.message)]
    (folder / "loading.json").write_text(json.dumps({"warnings": told} if told else {}))
    adapted.save_pretrained(folder / "again")
    record(adapted, folder)


def record(model, folder: Path) -> None:
    """Logits of fixed tokens, and a digest of each tensor rounded to bfloat16."""
    import numpy as np
    import torch

    ids = np.random.default_rng(0).integers(3, 120, (3, 37)).astype(np.int32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids, dtype=torch.long)).logits
    np.savez(folder / "golden.npz", input_ids=ids, logits=logits.float().numpy())
    bits = {name: x.detach().to(torch.bfloat16).contiguous().view(torch.uint8) for name, x in model.state_dict().items()}
    digests = {name: hashlib.sha256(x.numpy().tobytes()).hexdigest() for name, x in bits.items()}
    (folder / "digests.json").write_text(json.dumps(digests))


def main(command: str, *folders: str) -> int:
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return NO_TORCH
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    for folder in folders:
        {"make": make, "score": score}[command](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
