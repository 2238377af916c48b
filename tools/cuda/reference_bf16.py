"""What transformers' own arithmetic in bfloat16 does to the fixtures.

    python tools/cuda/reference_bf16.py OUT.json [DEVICE]

Runs every fixture that has results of its own by transformers in bfloat16 on DEVICE (cuda), and
writes for each

    own_routing   how many positions there are, and how many have logits further than 1 % (by norm)
                  from those of expected.safetensors, which are float32
    same_routing  by prompt, the relative error (norm) of the logits when every router chooses, and
                  weighs, as in float32

for the tests TestGPUOwnRouting and TestGPUSameRouting. transformers 5.17 keeps phimoe's short
factors past the longrope boundary: prompts past it are not in own_routing, and compared with
a float32 run of the same code in same_routing.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "testdata" / "fixtures"
BOUND = 1e-2


def load(name, dtype, device):
    # A fixture that differs in config.json only names the one whose weights it has.
    base = ROOT / name / "base"
    weights = ROOT / base.read_text().strip() if base.exists() else ROOT / name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights, config=transformers.AutoConfig.from_pretrained(ROOT / name), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.to(device).eval()


def routers(model):
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


class Choices:
    """Records what a model's routers choose, and lets another model's choose the same."""

    def __init__(self, exact, rounded):
        self.chosen = []
        self.inject = False
        for m in routers(exact):
            m.register_forward_hook(lambda module, inputs, output: self.chosen.append(output))
        for m in routers(rounded):
            m.register_forward_hook(self.replace)

    def replace(self, module, inputs, output):
        if self.inject:
            return tuple(theirs.to(ours.dtype) for theirs, ours in zip(self.chosen.pop(0), output))
        return output


def relative(got, want, **over):
    return (got - want).norm(**over) / want.norm(**over)


@torch.no_grad()
def measure(name, device):
    exact, rounded = load(name, torch.float32, device), load(name, torch.bfloat16, device)
    choices = Choices(exact, rounded)
    boundary = (rounded.config.rope_parameters or {}).get("original_max_position_embeddings")
    expected = load_file(ROOT / name / "expected.safetensors")
    positions = above = 0
    same = []
    for i in range(len([k for k in expected if k.startswith("ids")])):
        ids = torch.from_numpy(expected[f"ids{i}"]).long()[None].to(device)
        choices.inject, choices.chosen = False, []
        own = rounded(ids, use_cache=False).logits[0].float()
        want = exact(ids, use_cache=False).logits[0]
        choices.inject = True
        same.append(float(relative(rounded(ids, use_cache=False).logits[0].float(), want)))
        if not boundary or ids.shape[1] <= boundary:
            error = relative(own.cpu(), torch.from_numpy(expected[f"logits{i}"]), dim=-1)
            positions += len(error)
            above += int((~(error <= BOUND)).sum())
    print(f"{name}: {above} of {positions} positions above {BOUND}; with the same routing {[round(e, 4) for e in same]}", flush=True)
    return {"own_routing": {"positions": positions, "above": above}, "same_routing": same}


def main():
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    names = sorted(p.parent.name for p in ROOT.glob("*/expected.safetensors"))
    results = {name: measure(name, device) for name in names}
    with open(sys.argv[1], "w") as f:
        json.dump(results, f)


main()
