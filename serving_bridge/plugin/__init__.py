"""What runs inside vLLM. This folder is on the path of its interpreter, which sees the package `gspo_vllm` in it."""
