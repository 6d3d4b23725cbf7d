"""google-jetstream 0.2.2 over our adapter, in a process of its own: it brings TensorFlow and sets the root logger to DEBUG.

Prints one JSON object: what the adapter lacks of jetstream's Engine, and the tokens that the stock Driver generates.
"""

from __future__ import annotations

import inspect
import json

from rose_jax.jetstream.engine_api import DriverConfig, Qwen3Engine
from scripts.serving_clients import DriverClient
from scripts.serving_workload import Prompt
from tests.rose_jax.jetstream.serving_data import MODEL, params, prompt

PROMPTS = (prompt(20), prompt(1, seed=1), prompt(33, seed=2))
NUM_TOKENS = 6
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def missing_of(theirs: type) -> list[str]:
    """Abstract methods of `theirs` that Qwen3Engine lacks or could not be called as, by name."""
    missing = []
    for name in sorted(theirs.__abstractmethods__):  # type: ignore[attr-defined]
        wanted, ours = inspect.getattr_static(theirs, name), inspect.getattr_static(Qwen3Engine, name, None)
        if isinstance(wanted, property) or ours is None or isinstance(ours, property):
            missing += [] if type(wanted) is type(ours) else [name]
            continue
        has = inspect.signature(ours).parameters
        named = [item.name for item in inspect.signature(wanted).parameters.values() if item.kind not in VARIADIC]
        missing += [f"{name}({parameter})" for parameter in named if parameter not in has]
    return missing


def main() -> None:
    client = DriverClient(DriverConfig(max_slots=2, max_context_tokens=64, temperature=0.0), MODEL, params())
    from jetstream.engine import engine_api

    for stream_idx, token_ids in enumerate(PROMPTS):
        client.send(Prompt(stream_idx=stream_idx, token_ids=token_ids, max_tokens=NUM_TOKENS))
    answers = [client.answer() for _ in PROMPTS]
    tokens = {answer.stream_idx: answer.token_ids for answer in answers if answer is not None}
    print(json.dumps({"missing": missing_of(engine_api.Engine), "tokens": [tokens.get(idx) for idx in range(len(PROMPTS))]}))
    client.close()


if __name__ == "__main__":
    main()
