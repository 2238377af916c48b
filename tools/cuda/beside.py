"""moeserve compared with transformers on one GPU, with random weights in bfloat16.

    beside.py cells                           lists the cells
    beside.py run MOESERVE OUT.jsonl [...]    measures them one after the other, each in a process of its own
    beside.py table OUT.jsonl                 prints what was measured as Markdown

A cell is MODEL/SEQUENCES/WHAT, where WHAT is one of

    merged            moeserve bench throughput, experts once a layer over all sequences
    micro-batch       the same with experts once for each 324 sequences
    batch-invariant   merged, with --batch-invariant
    transformers      transformers' class of the model: attention sdpa, experts as grouped GEMMs, greedy,
                      a loop of forward calls over a DynamicCache

All run prompts of 77 random ids and generate 32 tokens for each sequence; end-of-sequence tokens are
ignored; both engines warm up, and figures are medians of trials. An invocation first measures the rates
of a GEMM of 8192^3 in bfloat16 and of reading memory; its later results name the invocation, so that
shares are of rates of the same run. OUT gets a line of JSON as soon as a cell is finished; an interrupted
invocation keeps them, and --resume skips these cells.

The operations of prefill are those of the GEMMs of each token (projections, router, selected and
shared experts), attention over half of the prompt on average, and the output layer for one token of
each sequence.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRESETS = ROOT / "configs" / "presets"
MIXTRAL, PHI, QWEN, TINY = "mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b", "phi-tiny-moe"
LARGE = {MIXTRAL: 3240, PHI: 3240, QWEN: 4536, TINY: 4536}
MICRO_BATCH = 324
OURS = ("merged", "micro-batch", "batch-invariant")


def cells():
    """All cells, those of a model together."""
    for model in (QWEN, TINY, MIXTRAL, PHI):
        if model != TINY:
            for n in (324, 1):
                yield f"{model}/{n}/merged"
                yield f"{model}/{n}/transformers"
        if model in (QWEN, MIXTRAL):
            yield f"{model}/324/batch-invariant"
        yield f"{model}/{LARGE[model]}/merged"
        yield f"{model}/{LARGE[model]}/micro-batch"
        if model == QWEN:
            yield f"{model}/{LARGE[model]}/batch-invariant"


def config_of(model, layers):
    config = json.loads((PRESETS / f"{model}.json").read_text())
    if layers:
        config["num_hidden_layers"] = layers
    return config


def prefill_flops(model, layers, sequences, length):
    """Operations of sequences prompts of length tokens, two a multiply-add."""
    c = config_of(model, layers)
    h, heads = c["hidden_size"], c["num_attention_heads"]
    d = c.get("head_dim") or h // heads
    experts = c.get("num_local_experts") or c["num_experts"]
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    row = 2 * h * d * (heads + 2 * c["num_key_value_heads"]) + 2 * heads * d * h + 2 * h * experts
    row += 6 * h * width * c["num_experts_per_tok"] + 6 * h * c.get("shared_expert_intermediate_size", 0)
    row += 2 * h if c.get("shared_expert_intermediate_size") else 0
    attention = 4 * heads * d * (length + 1) / 2
    return sequences * (length * c["num_hidden_layers"] * (row + attention) + 2 * h * c["vocab_size"])


def command(cell, o, json_path):
    """The command line that measures a cell."""
    model, n, what = cell.split("/")
    if what == "transformers":
        return [sys.executable, str(pathlib.Path(__file__)), "transformers", model, n, "--layers", str(o.layers),
                "--input-len", str(o.input_len), "--output-len", str(o.output_len), "--trials", str(o.reference_trials)]
    args = [o.moeserve, "bench", "throughput", "--device", "cuda", "--model", model, "--load-format", "dummy", "--num-prompts", n,
            "--input-len", str(o.input_len), "--output-len", str(o.output_len), "--warmup-tokens", "4", "--trials", str(o.trials),
            "--prefill-trials", "1", "--max-num-batched-tokens", str(max(o.batched_tokens, int(n))), "--gpu-memory-utilization", "0.98",
            "--json", json_path]
    if o.layers:
        args += ["--num-hidden-layers", str(o.layers)]
    if what == "micro-batch":
        args += ["--expert-grouping", "micro-batch", "--micro-batch-size", str(min(MICRO_BATCH, int(n)))]
    if what == "batch-invariant":
        args += ["--batch-invariant"]
    return args


def execute(args, seconds):
    """Runs a command, whose whole process group ends after some seconds; its exit code and output."""
    p = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = p.communicate(timeout=seconds)
        return p.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, err = p.communicate()
        return 124, out, err + f"\nended after {seconds:.0f} s"


def read(path):
    """The lines of a file of results; of a cell, the last. A line that was cut off is skipped."""
    found = {}
    if os.path.exists(path):
        for line in pathlib.Path(path).read_text().splitlines():
            try:
                r = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[r["run"] if r["cell"] == "ceilings" else r["cell"], r.get("layers", 0)] = r
    return found


def measure(o):
    begin = time.time()
    run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin))
    wanted = [c for c in cells() if any(fnmatch.fnmatchcase(c, p) for p in o.cells.split(","))]
    if not wanted:
        sys.exit(f"no cell is like {o.cells}: beside.py cells lists them")
    if o.resume:
        done = read(o.out)
        wanted = [c for c in wanted if "error" in done.get((c, o.layers), {"error": ""})]
    if not wanted:
        print("all of these cells are there")
        return 0
    if o.dry_run:
        for cell in wanted:
            print(" ".join(command(cell, o, "JSON")))
        return 0
    if not o.resume and os.path.exists(o.out):
        os.remove(o.out)

    def note(record):
        with open(o.out, "a") as f:
            f.write(json.dumps({"run": run, **record}) + "\n")
            f.flush()
            os.fsync(f.fileno())

    failures = 0
    for cell in ["ceilings", *wanted]:
        left = o.budget - (time.time() - begin) if o.budget else o.timeout
        if left < 15:
            print(f"no time left for {cell} and what follows: --resume goes on from there", flush=True)
            failures += 1
            break
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "result.json")
            args = [sys.executable, __file__, "ceilings"] if cell == "ceilings" else command(cell, o, path)
            start = time.time()
            code, out, err = execute(args, min(o.timeout, left))
            record = {"cell": cell, "layers": o.layers, "seconds": round(time.time() - start, 1)}
            try:
                if code:
                    raise ValueError(f"exit {code}")
                ours = cell.rsplit("/", 1)[-1] in OURS
                record["result"] = json.loads(pathlib.Path(path).read_text() if ours else out.splitlines()[-1])
            except (ValueError, OSError, IndexError) as e:
                failures += 1
                record["error"] = f"{e}: {(err or out).strip()[-600:]}"
            note(record)
        said = record.get("error") or summary(record)
        print(f"{cell}: {record['seconds']:.1f} s; {said}", flush=True)
    return 1 if failures else 0


def summary(record):
    r = record["result"]
    if record["cell"] == "ceilings":
        return f"{r['device']}: GEMM {r['product_flops'] / 1e12:.0f} TFLOP/s, reading {r['read_bytes_s'] / 1e12:.2f} TB/s ({r['read_by']})"
    f = figures(record)
    return f"prefill {f['prefill']:,.0f} tokens/s, decode {f['decode']:,.0f} tokens/s (spread {100 * f['spread']:.1f} %), end-to-end {f['whole']:,.0f} tokens/s"


def figures(record):
    """Tokens a second of a cell, by the medians of its trials."""
    r = record["result"]
    n = r["requests"]
    prefill = statistics.median(t["prefill_s"] for t in r["trials"] if not t.get("prefill_repeated"))
    times = [t["decode_s"] for t in r["trials"]]
    decode = statistics.median(times)
    return {
        "prefill": r["prompt_tokens"] / prefill,
        "decode": (r["generated_tokens"] - n) / decode,
        "whole": r["generated_tokens"] / (prefill + decode),
        "spread": (max(times) - min(times)) / decode,
        "prefill_s": prefill,
    }


def table(path):
    results = read(path)
    ceilings = {r["run"]: r["result"] for r in results.values() if r["cell"] == "ceilings" and "result" in r}
    for run, c in ceilings.items():
        print(f"{run}: {c['device']}, driver {c['driver']}, PyTorch {c['torch']}, transformers {c['transformers']}; a GEMM of 8192^3 in bfloat16 "
              f"{c['product_flops'] / 1e12:.0f} TFLOP/s, reading memory {c['read_bytes_s'] / 1e12:.2f} TB/s.")
    print()
    cell = {(*r["cell"].split("/"), r["layers"]): r for r in results.values() if r["cell"] != "ceilings"}
    whats = (*OURS, "transformers")
    rows = sorted(cell, key=lambda k: (list(LARGE).index(k[0]), k[3], int(k[1]), whats.index(k[2])))
    print("| model | sequences | what | decode, tokens/s | roofline, tokens/s | share of roofline | decode / transformers' | end-to-end, tokens/s | end-to-end / transformers' "
          "| prefill, tokens/s | prefill, TFLOP/s | share of the GEMM's | experts used per layer |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for model, n, what, layers in rows:
        record = cell[model, n, what, layers]
        name = model + (f", {layers} layers" if layers else "")
        start = f"| {name} | {int(n):,} | {what} |"
        if "error" in record:
            print(start, "failed" + " |" * 10)
            continue
        r, f = record["result"], figures(record)
        other = cell.get((model, n, "transformers", layers), {})
        other = figures(other) if "result" in other and what != "transformers" else None
        roofline = r.get("roofline")
        flops = prefill_flops(model, layers, int(n), r["prompt_tokens"] // r["requests"]) / f["prefill_s"]
        product = ceilings.get(record["run"], {}).get("product_flops")
        print(start, " | ".join((
            f"{f['decode']:,.0f}",
            f"{roofline['tok_s']:,.0f}" if roofline else "–",
            f"{100 * f['decode'] / roofline['tok_s']:.0f} %" if roofline else "–",
            f"{f['decode'] / other['decode']:.2f}" if other else "–",
            f"{f['whole']:,.0f}",
            f"{f['whole'] / other['whole']:.2f}" if other else "–",
            f"{f['prefill']:,.0f}",
            f"{flops / 1e12:.0f}",
            f"{100 * flops / product:.0f} %" if product else "–",
            f"{r['distinct_experts']:.1f}",
        )), "|")
    pairs = [(m, n, l) for m, n, what, l in rows if what == "batch-invariant" and "result" in cell[m, n, what, l] and "result" in cell.get((m, n, "merged", l), {})]
    if pairs:
        print("\n| model | sequences | batch-invariant: decode takes | prefill takes |")
        print("|---|---|---|---|")
    for m, n, l in pairs:
        off, on = figures(cell[m, n, "merged", l]), figures(cell[m, n, "batch-invariant", l])
        print(f"| {m} | {int(n):,} | {100 * (off['decode'] / on['decode'] - 1):+.1f} % | {100 * (off['prefill'] / on['prefill'] - 1):+.1f} % |")


def ceilings():
    """A GEMM of 8192^3 and the fastest of several ways to read 8 GiB, medians by the device's clock."""
    import torch
    import transformers

    def median(what, times):
        for _ in range(3):
            what()
        took = []
        for _ in range(times):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            a.record()
            what()
            b.record()
            torch.cuda.synchronize()
            took.append(a.elapsed_time(b) / 1e3)
        return statistics.median(took)

    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    out = torch.empty_like(x)
    product = 2 * 8192**3 / median(lambda: torch.matmul(x, y, out=out), 30)
    big = torch.empty(4 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    matrix, vector, wide = big.view(-1, 8192), torch.randn(8192, device="cuda", dtype=torch.bfloat16), big.view(torch.float32)
    ways = {"a bfloat16 matrix times a vector": lambda: matrix @ vector, "a float32 sum": lambda: wide.sum(), "a float32 maximum": lambda: wide.amax()}
    rates = {name: big.numel() * 2 / median(what, 7) for name, what in ways.items()}
    by = max(rates, key=rates.get)
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.split()
    print(json.dumps({
        "device": torch.cuda.get_device_name(), "driver": driver[0] if driver else "unknown", "torch": torch.__version__,
        "transformers": transformers.__version__, "product_flops": product, "read_bytes_s": rates[by], "read_by": by,
    }))


def reference(o):
    """Measures transformers, and prints a result with the names of moeserve's."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    n, length = o.sequences, o.input_len
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(config_of(o.model, o.layers)))
        config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    start = time.time()
    torch.set_default_dtype(torch.bfloat16)
    # Filled below, so that a weight is written once.
    with torch.device(o.device), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    fill(model)
    synchronize = torch.cuda.synchronize if o.device == "cuda" else lambda: None
    synchronize()
    built = time.time() - start
    prompts = torch.randint(0, config.vocab_size, (n, length), device=o.device)
    chosen = {}
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]

    def forward(ids, cache):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def trial(steps):
        cache = transformers.DynamicCache(config=config)
        synchronize()
        a = time.perf_counter()
        ids = forward(prompts, cache)
        synchronize()
        b = time.perf_counter()
        for _ in range(steps):
            ids = forward(ids, cache)
        synchronize()
        return {"prefill_s": b - a, "decode_s": time.perf_counter() - b}, ids, cache

    with torch.inference_mode():
        # As long as a trial, since the cache's sizes are new to the allocator at every step.
        trial(o.output_len - 1)
        trials = []
        for _ in range(o.trials):
            t, ids, cache = trial(o.output_len - 1)
            trials.append(t)
        # One step more shows which experts the last one went through, about.
        for i, m in enumerate(routers):
            m.register_forward_hook(lambda module, inputs, output, i=i: chosen.update({i: output}))
        forward(ids, cache)
    distinct, most = [], 0
    for output in chosen.values():
        (picked,) = [x for x in output if not x.is_floating_point()]
        counts = torch.bincount(picked.flatten().cpu())
        distinct.append(int((counts > 0).sum()))
        most = max(most, int(counts.max()))
    print(json.dumps({
        "model": o.model, "requests": n, "prompt_tokens": n * length, "generated_tokens": n * o.output_len, "trials": trials,
        "distinct_experts": statistics.mean(distinct), "max_tokens_per_expert": most, "build_s": round(built, 1),
        "hbm_peak_bytes": torch.cuda.max_memory_allocated() if o.device == "cuda" else 0,
        "attention": model.config._attn_implementation, "experts": model.config._experts_implementation,
    }))


def fill(model):
    """Random weights with a deviation of 1 / sqrt(inputs), norms 1, biases 0: as moeserve's dummy weights, about."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 1 if "embed_tokens" in name else p.shape[-1] ** -0.5)
            else:
                p.fill_(0 if name.endswith("bias") else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cells")
    commands.add_parser("ceilings")
    p = commands.add_parser("table")
    p.add_argument("out")
    p = commands.add_parser("run")
    p.add_argument("moeserve")
    p.add_argument("out")
    p.add_argument("--cells", default="*", help="patterns, separated by commas: */324/*,*/1/*")
    p.add_argument("--layers", type=int, default=0, help="number of layers; 0: the model's")
    p.add_argument("--input-len", type=int, default=77)
    p.add_argument("--output-len", type=int, default=32)
    p.add_argument("--trials", type=int, default=3, help="of moeserve; one of them computes the prompts")
    p.add_argument("--reference-trials", type=int, default=3, help="of transformers, each with its prompts")
    p.add_argument("--batched-tokens", type=int, default=8192, help="maximum tokens of a step of moeserve")
    p.add_argument("--timeout", type=float, default=240, help="seconds that a cell may take")
    p.add_argument("--budget", type=float, default=0, help="seconds for all cells together; what is not finished by then is stopped or not started; 0: no limit")
    p.add_argument("--resume", action="store_true", help="skip the cells that OUT has, and add to it")
    p.add_argument("--dry-run", action="store_true", help="print the commands only")
    p = commands.add_parser("transformers", help="one cell of transformers, in this process")
    p.add_argument("model")
    p.add_argument("sequences", type=int)
    p.add_argument("--layers", type=int, default=0)
    p.add_argument("--input-len", type=int, default=77)
    p.add_argument("--output-len", type=int, default=32)
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--device", default="cuda")
    o = parser.parse_args()
    if o.command == "cells":
        print("\n".join(cells()))
    elif o.command == "ceilings":
        ceilings()
    elif o.command == "table":
        table(o.out)
    elif o.command == "transformers":
        reference(o)
    else:
        sys.exit(measure(o))


if __name__ == "__main__":
    main()
