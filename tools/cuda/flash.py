"""FlashAttention 3 at the shapes of TestMeasurePrompts (kernels/cuda), as a yardstick.

    flash.py run OUT.json                times it on this machine's GPU
    flash.py table OURS.json OUT.json    prints both as one table; OURS.json is what TestMeasurePrompts wrote

FlashAttention 3 is that of an installed vLLM (vllm.vllm_flash_attn); where there is none, PyTorch's
scaled_dot_product_attention takes its place, whose rows name it. Keys and values lie in one piece, and for
FlashAttention 3 also in blocks of 16 tokens in no order, as vLLM has them. Decode steps are timed eight at once, in a CUDA
graph and over other blocks (or the same piece) each. Operations are those of the
positions that a token attends to; times are medians.
"""

import json
import statistics
import sys

# Heads of Q, KV heads; sequences, tokens of the step, context of each.
MODELS = {"mixtral-8x7b": (32, 8), "qwen3-30b-a3b": (32, 4)}
# Models whose attention has the shape of another's: longrope, where they have it, is applied before.
ALIKE = {"phi-3.5-moe": "mixtral-8x7b"}
K = 1024
PROMPTS = [(1, n, n) for n in (4 * K, 16 * K, 32 * K, 128 * K)] + [(1, 8 * K, n) for n in (32 * K, 128 * K)]
DECODES = [(s, 1, n) for n in (32 * K, 128 * K) for s in (1, 8, 32)]
HEAD, BLOCK, IN_TURN = 128, 16, 8


def attended(tokens, context):
    return tokens * (context - tokens) + tokens * (tokens + 1) // 2


def key(r):
    return r["model"], r["sequences"], r["tokens"], r["context"]


def timed(torch, f, least=3, most=20, budget=0.15):
    f()
    torch.cuda.synchronize()

    def once():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        f()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    first = once()
    return statistics.median(once() for _ in range(max(least, min(most, int(budget / first)))))


def run(path):
    import torch

    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func as flash
    except Exception as e:  # an import of a cut-down vLLM fails in many ways
        print(f"no FlashAttention 3 ({type(e).__name__}: {e}): PyTorch instead", file=sys.stderr)
        flash = None
    torch.manual_seed(1)
    device, dtype, results = "cuda", torch.bfloat16, []

    def add(model, case, kernel, f):
        sequences, tokens, context = case
        heads, kv_heads = MODELS[model]
        try:
            if tokens == 1:
                f(0)  # loads code
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(IN_TURN):
                        f(i)
                seconds = timed(torch, graph.replay) / IN_TURN
            else:
                seconds = timed(torch, lambda: f(0))
        except Exception as e:  # what a build lacks is missing in the table
            print(f"{model} {case} {kernel}: {type(e).__name__}: {e}", file=sys.stderr)
            return
        results.append({
            "model": model, "sequences": sequences, "tokens": tokens, "context": context, "kernel": kernel, "seconds": seconds,
            "flops_per_s": 4 * heads * HEAD * sequences * attended(tokens, context) / seconds,
            "bytes_per_s": 4 * kv_heads * HEAD * sequences * context / seconds,
        })

    for model, (heads, kv_heads) in MODELS.items():
        most = max(s * n for s, _, n in DECODES)
        k, v = (torch.randn(most, kv_heads, HEAD, device=device, dtype=dtype) for _ in range(2))
        for case in PROMPTS + DECODES:
            sequences, tokens, context = case
            q = torch.randn(sequences * tokens, heads, HEAD, device=device, dtype=dtype)
            starts = torch.arange(0, sequences + 1, device=device, dtype=torch.int32) * tokens
            n = sequences * context
            if flash is None:
                if tokens != context:
                    continue
                some = [x[:n].view(sequences, context, -1, HEAD).transpose(1, 2) for x in (q, k, v)]
                add(model, case, "torch sdpa", lambda i: torch.nn.functional.scaled_dot_product_attention(*some, is_causal=True, enable_gqa=True))
                continue
            ends = torch.arange(0, sequences + 1, device=device, dtype=torch.int32) * context
            add(model, case, "FA3", lambda i: flash(q, k[:n], v[:n], tokens, starts, context, cu_seqlens_k=ends, causal=True, fa_version=3))
            tables = [torch.randperm(most // BLOCK, device=device)[: n // BLOCK].to(torch.int32).view(sequences, -1) for _ in range(IN_TURN if tokens == 1 else 1)]
            used = torch.full((sequences,), context, device=device, dtype=torch.int32)
            paged = [x.view(-1, BLOCK, kv_heads, HEAD) for x in (k, v)]
            add(model, case, "FA3 paged",
                lambda i: flash(q, *paged, tokens, starts, context, seqused_k=used, block_table=tables[i], causal=True, fa_version=3))
        del k, v
    with open(path, "w") as f:
        json.dump({"device": torch.cuda.get_device_name(), "results": results}, f, indent=1)


def table(ours, theirs):
    with open(ours) as f:
        mine = json.load(f)
    try:
        with open(theirs) as f:
            flash = json.load(f)["results"]
    except OSError:
        flash = []
    others = {}
    for r in flash:
        others.setdefault(key(r), {})[r["kernel"]] = r
    print(f"Reading memory: {mine['read_bytes_per_s'] / 1e12:.2f} TB/s; a prompt's rates are in TFLOP/s, a decode step's in TB/s.")
    for model, measured in ALIKE.items():
        heads, kv_heads = MODELS[measured]
        print(f"{model} has the attention of {measured}, {heads} heads of {HEAD} and {kv_heads} of keys and values: its rows are those.")
    print()
    rows = [["model", "sequences", "new tokens", "context", "kernel", "ms", "rate", "FA3", "FA3 paged", "share of FA3", "share of reading"]]
    for r in mine["results"]:
        rate, unit = ("bytes_per_s", 1e12) if r["tokens"] == 1 else ("flops_per_s", 1e12)
        other = others.get(key(r), {})
        their = [other.get(name) for name in ("FA3", "FA3 paged")]
        if not any(their):
            their = [other.get("torch sdpa"), None]
        best = max((o[rate] for o in their if o), default=0)
        rows.append([
            r["model"], r["sequences"], r["tokens"], r["context"], r["kernel"], f"{r['seconds'] * 1e3:.3f}", f"{r[rate] / unit:.2f}",
            *(f"{o[rate] / unit:.2f}" + (" (torch)" if o["kernel"] == "torch sdpa" else "") if o else "-" for o in their),
            f"{100 * r[rate] / best:.0f} %" if best else "-",
            f"{100 * r['bytes_per_s'] / mine['read_bytes_per_s']:.0f} %" if r["tokens"] == 1 else "-",
        ])
    for i, row in enumerate(rows):
        print("| " + " | ".join(str(x) for x in row) + " |")
        if i == 0:
            print("|" + "---|" * len(row))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "run":
        run(sys.argv[2])
    elif len(sys.argv) == 4 and sys.argv[1] == "table":
        table(*sys.argv[2:])
    else:
        sys.exit(__doc__)
