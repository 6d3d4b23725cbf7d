"""KeyedSampler: vLLM's sampler with our randomness and our log-probabilities.

vLLM keeps one random generator per request, which moves on with every draw, also with those it throws away; what a request draws
then depends on how its prompt was cut into chunks and on how often it was preempted. Here the generator of a row is seeded anew
for each token from the request's key and the token's position, so that a draw depends on nothing else. Log-probabilities are those
that SamplingParams asks for: at the request's temperature and before top-k, top-p and min-p, which vLLM's own modes do not offer.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from common.types import SamplingKey

SEED_ARGUMENT = "rose_seed"
"""Where a request carries its key's seed: in the extra_args of vLLM's SamplingParams."""
GREEDY_BELOW = 1e-5
"""vLLM's own limit, below which a temperature counts as 0."""
_MASK = (1 << 64) - 1


def key_seed(key: SamplingKey) -> int:
    """63 bits from a key, in which each part has its say; parts must lie in [0, 2**32)."""
    digest = hashlib.blake2b(np.array([key.run_seed, key.trajectory_id, key.turn_idx], "<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def token_seed(seed: int, position: int) -> int:
    """The 63-bit seed of one draw: SplitMix64 (Steele, Lea, Flood 2014) of the request's seed at `position` tokens."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class KeyedSampler(Sampler):
    """See the module. `runner` is the model runner whose rows are sampled."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self._generators: list[torch.Generator] = []

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        logits = logits.to(torch.float32)
        temperature = sampling_metadata.temperature
        tempered = logits if temperature is None else logits / torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
        logprobs = tempered.log_softmax(dim=-1)
        keyed = dataclasses.replace(
            sampling_metadata, generators=self._seeded(sampling_metadata, logits.device), max_num_logprobs=None
        )
        output = super().forward(logits, keyed, predict_bonus_token)
        num_top = sampling_metadata.max_num_logprobs
        if num_top is not None:
            output.logprobs_tensors = _gather(logprobs, output.sampled_token_ids[:, 0].long(), num_top)
        return output

    def _seeded(self, metadata: SamplingMetadata, device: torch.device) -> dict[int, torch.Generator]:
        """A generator for each row that draws at random, seeded for the token at hand."""
        if metadata.all_greedy:
            return {}
        batch = self._runner.input_batch
        while len(self._generators) < batch.num_reqs:
            self._generators.append(torch.Generator(device=device))
        seeded = {}
        for row, request_id in enumerate(batch.req_ids):
            state = self._runner.requests[request_id]
            if state.sampling_params.temperature >= GREEDY_BELOW:
                seed = state.sampling_params.extra_args[SEED_ARGUMENT]
                seeded[row] = self._generators[row].manual_seed(token_seed(seed, len(state.output_token_ids)))
        return seeded


def _gather(logprobs: torch.Tensor, sampled: torch.Tensor, num_top: int) -> LogprobsTensors:
    """Column 0 holds the sampled token's, the others the `num_top` most probable tokens', best first. Ranks are not computed."""
    top_values, top_ids = torch.topk(logprobs, num_top, dim=-1)
    ids = torch.cat([sampled[:, None], top_ids], dim=1)
    values = torch.cat([logprobs.gather(-1, sampled[:, None]), top_values], dim=1)
    return LogprobsTensors(ids.to(torch.int32), values, torch.zeros_like(sampled))
