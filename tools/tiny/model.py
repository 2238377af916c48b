"""A Mixtral block for training, and the checkpoint it is written to.

Training computes every expert for every token and weights them with the router's sparse weights. That is more
arithmetic than the two selected experts need, but plain dense GEMMs, and it drops no token.
"""

import dataclasses
import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from vocabulary import Vocabulary


@dataclasses.dataclass
class Shape:
    """Sizes of the model; context is in tokens."""

    vocabulary: int
    hidden: int = 128
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    chosen: int = 2
    intermediate: int = 176
    context: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def config(self):
        """The checkpoint's config.json."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "max_position_embeddings": self.context,
            "sliding_window": None,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.01,
            "router_jitter_noise": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }


def rms_norm(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def matrix(rows, columns, std):
    return nn.Parameter(torch.randn(rows, columns) * std)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        std = s.hidden**-0.5
        self.q = matrix(s.heads * s.head_dim, s.hidden, std)
        self.k = matrix(s.kv_heads * s.head_dim, s.hidden, std)
        self.v = matrix(s.kv_heads * s.head_dim, s.hidden, std)
        self.o = matrix(s.hidden, s.heads * s.head_dim, std / math.sqrt(2 * s.layers))

    def forward(self, x, mask, cos, sin):
        s, (rows, length, _) = self.s, x.shape
        heads = lambda weight, count: F.linear(x, weight).view(rows, length, count, s.head_dim).transpose(1, 2)
        q, k, v = heads(self.q, s.heads), heads(self.k, s.kv_heads), heads(self.v, s.kv_heads)
        q, k = rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(out.transpose(1, 2).reshape(rows, length, -1), self.o)


def rotated(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Experts(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        wide = s.experts * s.intermediate
        self.gate = matrix(s.experts, s.hidden, 0.02)
        self.w1 = matrix(wide, s.hidden, s.hidden**-0.5)
        self.w3 = matrix(wide, s.hidden, s.hidden**-0.5)
        self.w2 = matrix(wide, s.hidden, (s.chosen * s.intermediate) ** -0.5 / math.sqrt(2 * s.layers))

    def forward(self, x, filled):
        """Returns the output, the balance loss (1 when even), and the chosen experts [rows, length, chosen]."""
        s = self.s
        with torch.autocast(x.device.type, enabled=False):
            chance = F.linear(x.float(), self.gate).softmax(-1)
        weight, chosen = chance.topk(s.chosen, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        sparse = torch.zeros_like(chance).scatter(-1, chosen, weight)
        inner = F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3)
        inner = (inner.unflatten(-1, (s.experts, -1)) * sparse[..., None].to(inner.dtype)).flatten(-2)
        count = filled.sum()
        used = ((sparse > 0).float() * filled[..., None]).sum((0, 1)) / count
        hoped = (chance * filled[..., None]).sum((0, 1)) / count
        return inner @ self.w2.to(inner.dtype), s.experts * (used * hoped).sum() / s.chosen, chosen


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.eps = s.norm_eps
        self.before_attention = nn.Parameter(torch.ones(s.hidden))
        self.before_experts = nn.Parameter(torch.ones(s.hidden))
        self.attention, self.experts = Attention(s), Experts(s)

    def forward(self, x, mask, cos, sin, filled):
        x = x + self.attention(rms_norm(x, self.before_attention, self.eps), mask, cos, sin)
        out, balance, chosen = self.experts(rms_norm(x, self.before_experts, self.eps), filled)
        return x + out, balance, chosen


class Model(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.embedding = matrix(s.vocabulary, s.hidden, 0.5)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.hidden))
        self.head = matrix(s.vocabulary, s.hidden, s.hidden**-0.5 / 2)
        frequency = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.arange(s.context).float()[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids, conversation):
        """Logits [rows, length, vocabulary], the balance loss, and the chosen experts of each layer.

        conversation [rows, length] numbers the conversations in a row from 1; 0 is padding.
        """
        length = ids.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        mask = ((conversation[:, :, None] == conversation[:, None]) & past)[:, None].expand(-1, self.s.heads, -1, -1)
        filled = (conversation > 0).float()
        x, balance, chosen = F.embedding(ids, self.embedding), 0.0, []
        for layer in self.layers:
            x, b, c = layer(x, mask, self.cos[:length], self.sin[:length], filled)
            balance = balance + b / len(self.layers)
            chosen.append(c)
        return F.linear(rms_norm(x, self.norm, self.s.norm_eps), self.head), balance, chosen

    def tensors(self):
        """The weights under their names in a Mixtral checkpoint, in bf16."""
        s = self.s
        named = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.head,
        }
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            named[at + "input_layernorm.weight"] = layer.before_attention
            named[at + "post_attention_layernorm.weight"] = layer.before_experts
            for name in "qkvo":
                named[f"{at}self_attn.{name}_proj.weight"] = getattr(layer.attention, name)
            named[at + "block_sparse_moe.gate.weight"] = layer.experts.gate
            split = lambda weight: weight.unflatten(0, (s.experts, s.intermediate))
            w1, w2, w3 = (split(w) for w in (layer.experts.w1, layer.experts.w2, layer.experts.w3))
            for e in range(s.experts):
                expert = f"{at}block_sparse_moe.experts.{e}."
                named[expert + "w1.weight"], named[expert + "w3.weight"] = w1[e], w3[e]
                named[expert + "w2.weight"] = w2[e].T
        return {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in named.items()}

    def write(self, folder, vocabulary: Vocabulary):
        """Writes a complete checkpoint into folder, a pathlib.Path."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = folder / "model.safetensors"
        save_file(self.tensors(), weights, metadata={"format": "pt"})
        weights.chmod(0o644)
        generation = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "max_new_tokens": vocabulary.answer}
        for name, content in (("config.json", self.s.config()), ("generation_config.json", generation)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        vocabulary.write(folder, self.s.context)
