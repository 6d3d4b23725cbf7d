"""One call of each kind under way at the same time, for tests of what ends them."""

from __future__ import annotations

import threading
from typing import Any

import openai

from tests.common.serving.front.running import MODEL, ROLLOUT_TOKEN, RunningFront

NUM_TOKENS = 300
"""Of each call: enough for all three to be under way together."""
FIELDS = {"model": MODEL, "prompt": "go", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


class Calls:
    """A whole, a streamed and a rollout call under way, each in a thread."""

    def __init__(self, front: RunningFront) -> None:
        self.outcomes: dict[str, Any] = {}
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=60)
        turn = {
            "call_id": "call-0001",
            "prompt_token_ids": [1, 2, 3],
            "sampling": {"max_tokens": NUM_TOKENS},
            "key": {"run_seed": 3, "trajectory_id": 1, "turn_idx": 0},
        }

        def streamed() -> list[str | None]:
            body = {"ignore_eos": True}
            events = client.completions.create(model=MODEL, prompt="go", max_tokens=NUM_TOKENS, stream=True, extra_body=body)
            return [event.choices[0].finish_reason for event in events]

        self._start("whole", lambda: front.ask("/v1/completions", FIELDS))
        self._start("streamed", streamed)
        self._start("rollout", lambda: front.ask("/rollout/v1/generate", turn, token=ROLLOUT_TOKEN))
        front.wait_until(lambda: front.engine.load().running_requests == 3)

    def _start(self, name: str, call: Any) -> None:
        def run() -> None:
            try:
                self.outcomes[name] = call()
            except openai.APIError as error:
                self.outcomes[name] = error

        self._threads = [*getattr(self, "_threads", []), threading.Thread(target=run)]
        self._threads[-1].start()

    def join(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join(60)
        assert len(self.outcomes) == 3, "a call got no answer"
        return self.outcomes
