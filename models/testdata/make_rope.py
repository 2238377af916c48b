"""Writes rope.json: inverse frequencies and scales of rotary embeddings, as the reference (transformers) has them.

    python3 -m venv venv && venv/bin/pip install transformers==5.23.0 torch==2.15.0
    venv/bin/python make_rope.py

A case is what a config.json has beside head_dim: theta, the RoPE object, and original_max_position_embeddings of its own.
"""

import itertools
import json
import pathlib

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OBJECTS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.3},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 3.7, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2.5},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16384, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4, "truncate": False},
]

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
out = []
for rope, (dim, theta), own in itertools.product(OBJECTS, [(128, 1e6), (64, 10000.0), (16, 5e5)], [None, 2048]):
    if own and rope["rope_type"] not in ("llama3", "yarn") or own and dim != 64:
        continue
    extra = {"original_max_position_embeddings": own} if own else {}
    config = transformers.MixtralConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=131072, rope_parameters=dict(rope, rope_theta=theta), **extra
    )
    if rope["rope_type"] == "default":
        inverse, scale = transformers.models.mixtral.modeling_mixtral.MixtralRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    assert inverse.dtype == torch.float32
    out.append({"head_dim": dim, "theta": theta, "rope": rope, "original": own, "inverse": inverse.tolist(), "scale": float(scale)})
lines = ",\n".join(json.dumps(c) for c in out)
(pathlib.Path(__file__).parent / "rope.json").write_text("[\n" + lines + "\n]\n")
