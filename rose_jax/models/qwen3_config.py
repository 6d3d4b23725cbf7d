"""The shape of a Qwen3 (dense) model, and its translation from and to the config.json of a Hugging Face checkpoint.

Only what this model computes is accepted: a config.json that asks for sliding windows, scaled rotary embedding, attention biases,
another activation or quantized weights is refused with the field named, since loading it would give wrong numbers in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"

_SIZES = {  # field here -> field in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
_DEFAULT_HEAD_DIM = 128  # what transformers' Qwen3Config takes when config.json leaves it out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes and constants of one model. `head_dim` need not be hidden_size / num_heads."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40_960
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Qwen3Config:
        """Read the fields of a config.json.

        Raises:
            ValueError: a field is missing, or asks for something this model does not compute.
        """
        _refuse_unsupported(fields)
        missing = [name for name in _SIZES.values() if fields.get(name) is None and name != "num_key_value_heads"]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        sizes: dict[str, Any] = {ours: fields.get(theirs) for ours, theirs in _SIZES.items()}
        if sizes["num_kv_heads"] is None:
            sizes["num_kv_heads"] = sizes["num_heads"]
        eos = fields.get("eos_token_id")
        return cls(
            **sizes,
            head_dim=fields.get("head_dim") or _DEFAULT_HEAD_DIM,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            rope_theta=_rope_theta(fields),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
            pad_token_id=fields.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that transformers 4 and 5 and vLLM read alike (without the dtype of the weights)."""
        fields: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        fields |= {theirs: getattr(self, ours) for ours, theirs in _SIZES.items()}
        eos = self.eos_token_id
        return fields | {
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope_theta,  # transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},  # transformers 5
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "pad_token_id": self.pad_token_id,
            "use_cache": True,
        }


def _rope_theta(fields: Mapping[str, Any]) -> float:
    theta = (fields.get("rope_parameters") or {}).get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json lacks rope_theta (also looked for in rope_parameters)")
    return float(theta)


def _rope_types(fields: Mapping[str, Any]) -> list[str]:
    """transformers 5 writes rope_parameters, transformers 4 rope_scaling; either may ask for scaling."""
    given = [fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    return [rope.get("rope_type", rope.get("type", "default")) for rope in given]


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    model_type = fields.get("model_type")
    if model_type != MODEL_TYPE:
        raise ValueError(f"model_type={model_type!r} is not supported; only {MODEL_TYPE!r} (dense) is")
    layer_types = fields.get("layer_types") or []
    rope_types = _rope_types(fields)
    activation = fields.get("hidden_act", "silu")
    refused = {
        f"use_sliding_window={fields.get('use_sliding_window')}": bool(fields.get("use_sliding_window")),
        f"layer_types={sorted(set(layer_types))}": any(kind != "full_attention" for kind in layer_types),
        f"rope scaling of type {rope_types}": any(kind != "default" for kind in rope_types),
        f"attention_bias={fields.get('attention_bias')}": bool(fields.get("attention_bias")),
        f"hidden_act={activation!r} (only 'silu')": activation != "silu",
        f"quantization_config={fields.get('quantization_config')}": fields.get("quantization_config") is not None,
    }
    for field, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"config.json asks for {field}, which this Qwen3 does not compute")
