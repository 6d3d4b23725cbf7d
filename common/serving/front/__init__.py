"""The network side of a replica: OpenAI's HTTP interface, the rollout and control interface, the channel to the engine process."""
