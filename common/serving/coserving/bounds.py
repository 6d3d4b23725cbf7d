"""How much later than alone an online request can get its first token beside rollouts: D, from figures that are known in advance.

docs/coserving.md derives it. It holds while true step times stay within the stated error and the serving engine serves prompts in
the order of their arrival, giving each decoding request a token in every step.
"""

from __future__ import annotations

import dataclasses

from common.serving.coserving.admission import AdmissionSettings
from common.serving.coserving.objectives import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayBound:
    """Seconds, by cause; `ttft_delay_s` is D."""

    rollout_step_s: float
    switch_s: float
    serving_step_s: float
    deferred_decodes_s: float

    @property
    def ttft_delay_s(self) -> float:
        return self.rollout_step_s + self.switch_s + self.serving_step_s + self.deferred_decodes_s

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name[:-2]} {1e3 * getattr(self, field.name):.1f}" for field in dataclasses.fields(self))
        return f"D = {1e3 * self.ttft_delay_s:.1f} ms ({parts})"


def delay_bound(
    settings: AdmissionSettings,
    objective: Objective,
    *,
    error: float,
    switch_s: float,
    longest_serving_step_s: float,
    deferred_tokens: int,
    decode_token_s: float,
) -> DelayBound:
    """D for a device.

    Args:
        error: true durations are within 1 +- error of predicted ones.
        objective: the one with the shortest TTFT.
        deferred_tokens: the most tokens that live requests can be behind: slots times the longest output after its first token.
        decode_token_s: what one of them adds to a serving step.
    """
    return DelayBound(
        rollout_step_s=(1 + error) * settings.step_share * objective.ttft_s,
        switch_s=(1 + error) * switch_s,
        serving_step_s=(1 + error) * longest_serving_step_s,
        deferred_decodes_s=(1 + error) * deferred_tokens * decode_token_s,
    )
