"""Foreign clients, unchanged, against a replica process: the openai package, vLLM's serving benchmark, a JetStream gRPC client.

    python -m scripts.check_clients [--config=FILE] [--backends=jetstream,vllm] [--model=DIR] [--out=clients.json]

Prints what each of them prints. Needs `make serve-env`. Without --model it serves a small random model, written to a folder first,
since vLLM's benchmark wants a tokenizer to make its prompts with.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from common.config import Config, MeshConfig
from common.rollout.environment import load_task_suite
from scripts import entry
from scripts.serving_process import ServingProcess

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/frozenlake_cpu.py")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder to serve; default: a random model.", flag_values=_FLAGS)
_BACKENDS = flags.DEFINE_list("backends", ["jetstream", "vllm"], "Engines to show.", flag_values=_FLAGS)
_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "Requests of vLLM's benchmark.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.", flag_values=_FLAGS)

BENCH_COMMAND = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; parser = argparse.ArgumentParser(); "
    "add_cli_args(parser); main(parser.parse_args())"
)
"""What `vllm bench serve` runs; the command itself looks up the package's metadata by a name that CPU builds do not have."""
BENCH_TIMEOUT_S = 600


@contextlib.contextmanager
def model_folder(config: Config) -> Iterator[Path]:
    """The folder that is served."""
    if _MODEL.value is not None:
        yield Path(_MODEL.value)
        return
    from rose_jax.export import save_checkpoint
    from rose_jax.mesh import make_mesh
    from rose_jax.policy import build_policy

    with tempfile.TemporaryDirectory(prefix="rose_clients_") as parent:
        folder = Path(parent) / "random"
        policy = build_policy(config, load_task_suite(config.env.factory, config.env.options), make_mesh(MeshConfig()))
        save_checkpoint(
            folder, policy.params, policy.model_config, dtype=config.model.weights_dtype, save_tokenizer=policy.chat.save
        )
        yield folder


def openai_client(server: ServingProcess) -> dict[str, Any]:
    """A completion, a streamed chat, log-probabilities, several choices, and an error."""
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    models = [model.id for model in client.models.list()]
    completion = client.completions.create(model=models[0], prompt="up down", max_tokens=6, n=2, seed=1, logprobs=2)
    messages: Any = [{"role": "user", "content": "up down"}]
    chat = client.chat.completions.create(model=models[0], messages=messages, max_tokens=6, logprobs=True, top_logprobs=2, seed=1)
    events = client.chat.completions.create(
        model=models[0], messages=messages, max_tokens=6, seed=1, stream=True, stream_options={"include_usage": True}
    )
    streamed = [event.model_dump(exclude_none=True) for event in events]
    try:
        client.completions.create(model=models[0], prompt="up", max_tokens=10**6)
        refused = "nothing was refused"
    except openai.BadRequestError as error:
        refused = f"{type(error).__name__}: {error}"
    return {
        "models": models,
        "completion": completion.model_dump(exclude_none=True),
        "chat": chat.model_dump(exclude_none=True),
        "chat_events": streamed,
        "too_long": refused,
    }


def vllm_benchmark(server: ServingProcess, folder: Path) -> dict[str, Any]:
    """vLLM's own benchmark client, on both endpoints, with random prompts."""
    found: dict[str, Any] = {}
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        arguments = [
            f"--backend={backend}",
            f"--base-url={server.url}",
            f"--endpoint={endpoint}",
            f"--model={server.model}",
            f"--tokenizer={folder}",
            "--dataset-name=random",
            "--random-input-len=24",
            "--random-output-len=24",
            f"--num-prompts={_PROMPTS.value}",
            "--max-concurrency=8",
            "--ignore-eos",
            "--disable-tqdm",
        ]
        ended = subprocess.run(
            [sys.executable, "-c", BENCH_COMMAND, *arguments], capture_output=True, text=True, timeout=BENCH_TIMEOUT_S
        )
        if ended.returncode != 0:
            raise ValueError(f"vLLM's benchmark ended with status {ended.returncode}:\n{ended.stderr[-3000:]}")
        found[backend] = ended.stdout[ended.stdout.find("=====") :]
    return found


def jetstream_client(server: ServingProcess) -> dict[str, Any]:
    """JetStream's own generated client."""
    import grpc
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    request = jetstream_pb2.DecodeRequest
    with grpc.insecure_channel(f"{server.address[0]}:{server.report['grpc_port']}") as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        live = stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        by_text = list(stub.Decode(request(text_content=request.TextContent(text="up down"), max_tokens=6)))
        ids = [token_id for response in by_text for token_id in response.stream_content.samples[0].token_ids]
        by_ids = list(stub.Decode(request(token_content=request.TokenContent(token_ids=ids), max_tokens=6)))
    return {
        "is_live": live,
        "text": "".join(response.stream_content.samples[0].text for response in by_text),
        "token_ids": ids,
        "continued": [token_id for response in by_ids for token_id in response.stream_content.samples[0].token_ids],
    }


def main() -> None:
    shown: dict[str, Any] = {}
    with model_folder(_CONFIG.value) as folder:
        for backend in _BACKENDS.value:
            arguments = [*entry.config_arguments(), f"--model={folder}", f"--backend={backend}", "--grpc_port=0"]
            with ServingProcess(arguments) as server:
                clients = {
                    "openai": openai_client(server),
                    "jetstream_grpc": jetstream_client(server),
                    "vllm_bench_serve": vllm_benchmark(server, folder),
                }
            shown[backend] = clients
            for name, output in clients.items():
                print(f"\n== {backend}: {name}")
                for key, value in output.items():
                    print(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    entry.run(main)
