"""The GPU side: vLLM behind the StepEngine contract."""
