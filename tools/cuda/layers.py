"""Checkpoints of one layer in the full shape of each preset, with PyTorch's results.

    python tools/cuda/layers.py FOLDER [DEVICE [PRESET...]]

For each preset of configs/presets, writes FOLDER/PRESET with a config.json of one layer, seeded
random weights in bfloat16, and reference.safetensors:

    ids           the prompt
    logits        [tokens, vocabulary], float32: the weights as they are, arithmetic in float32
    margins       [tokens]: how far the router's score of the last expert chosen is ahead of the best
                  that is not (for sparsemixer the least of that and of what decides on masks), float32
    router_error  how far transformers' router scores in bfloat16 are off, at most

and prints a line "PRESET PATH" as each is complete. The test TestGPULayers reads and deletes them.
Weights are scaled so that activations are of order 1: linear ones by 1/sqrt(inputs), norms near 1.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

PRESETS = pathlib.Path(__file__).resolve().parents[2] / "configs" / "presets"
TOKENS = 33


def fill(name, tensor, generator):
    """Random values for one weight, in place."""
    tensor.normal_(generator=generator)
    if name.endswith("bias"):
        tensor.mul_(0.1)
    elif "norm" in name:
        tensor.mul_(0.1).add_(1)
    elif "embed_tokens" not in name:
        tensor.mul_(tensor.shape[-1] ** -0.5)


def margins(scores, router):
    """By position, how clearly a router chose."""
    if not hasattr(router, "router_jitter_noise"):
        ranked = scores.sort(dim=-1, descending=True).values
        return ranked[:, router.top_k - 1] - ranked[:, router.top_k]
    # Sparsemixer: the choice, and which experts the softmax leaves out.
    eps = router.router_jitter_noise
    least, left = torch.full_like(scores[:, 0], float("inf")), scores
    for _ in range(router.top_k):
        best, at = left.max(dim=-1, keepdim=True)
        others = torch.ones_like(scores).scatter(-1, at, 0.0).bool() & left.isfinite()
        reach = scores.abs().clamp(min=best)
        mask = ((best - scores) / reach - 2 * eps).abs() * reach
        for gap in (best - left, mask):
            least = torch.minimum(least, gap.masked_fill(~others, float("inf")).min(dim=-1).values)
        left = left.scatter(-1, at, float("-inf"))
    return least


def make(folder, preset, device):
    config = json.loads((PRESETS / f"{preset}.json").read_text())
    config["num_hidden_layers"] = 1
    path = folder / preset
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoConfig.from_pretrained(path)
    loaded._attn_implementation = loaded._experts_implementation = "eager"
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(loaded).eval()
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device=device).manual_seed(sum(preset.encode()))
    for name, tensor in model.state_dict().items():
        fill(name, tensor, generator)
    model.save_pretrained(path, max_shard_size="100GB", safe_serialization=True)
    (path / "config.json").write_text(json.dumps(config))  # the published names, as users have them

    seen = []
    (router,) = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    router.register_forward_hook(lambda module, inputs, output: seen.append(output[0].float()))
    ids = torch.randint(0, config["vocab_size"], (TOKENS,), generator=generator, device=device)
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        rounded = model(ids[None], use_cache=False).logits[0].float()
        # Tables that are computed once, like RoPE's frequencies, are float32 in a model in bfloat16, too.
        logits = model.float()(ids[None], use_cache=False).logits[0]
    low, high = seen
    save_file(
        {
            "ids": ids.int().cpu(),
            "logits": logits.cpu().contiguous(),
            "margins": margins(high, router).cpu().contiguous(),
            "router_error": (low - high).abs().max().reshape(1).cpu(),
            "bf16_error": ((rounded - logits).norm(dim=-1) / logits.norm(dim=-1)).cpu().contiguous(),
        },
        path / "reference.safetensors",
    )
    print(preset, path, flush=True)


def main():
    folder = pathlib.Path(sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    for preset in sys.argv[3:] or sorted(p.stem for p in PRESETS.glob("*.json")):
        make(folder, preset, device)
        if device == "cuda":
            torch.cuda.empty_cache()


main()
