"""--policy auto beside policies that are given, on one machine: is what the planner chooses near the best of them?

    policy.py MOESERVE FOLDER SECONDS LAYERS MODELS [ARGUMENTS...]

For each of MODELS (presets, separated by commas; empty: the built-in model), cut to LAYERS (0: whole), half of the experts
are in host memory, and `bench throughput` measures the policy that the planner chooses and those of GRID. FOLDER gets
the results. The models share SECONDS; what there is no time for is named. ARGUMENTS say on what it runs. It fails where
the planner's policy is more than TOLERANCE slower than the best cell, or fewer than LEAST cells were measured.
"""

import json
import os
import subprocess
import sys
import time

TOLERANCE, LEAST = 0.05, 3
# The batch is given, so these are the choices that matter: how many prompt tokens a step has, how it is split and
# ordered, and where attention is.
LOAD = "--num-prompts 324 --input-len 77 --output-len 12 --warmup-tokens 2 --trials 1 --prefill-trials 1".split()
GRID = [
    "--max-num-batched-tokens 32768",
    "--max-num-batched-tokens 8192",
    "--max-num-batched-tokens 32768 --num-micro-batches 2",
    "--max-num-batched-tokens 16384",
    "--max-num-batched-tokens 8192 --attention cpu",
    "--max-num-batched-tokens 32768 --num-micro-batches 4 --expert-grouping micro-batch",
    "--max-num-batched-tokens 2048",
]
# Of the built-in model, on emulated devices that have little memory.
LITTLE_LOAD = "--num-prompts 64 --input-len 40 --output-len 16 --warmup-tokens 0 --trials 1 --prefill-trials 1".split()
LITTLE = ["--max-num-batched-tokens 64", "--max-num-batched-tokens 320", "--max-num-batched-tokens 640", "--max-num-batched-tokens 640 --attention cpu"]
MISFITS = ("out of memory", "there is room for")


def measure(command, result, until):
    """End-to-end tokens per second, or why there are none, and whether that is a failure."""
    left = until - time.monotonic()
    if left <= 1:
        return "no time left", False
    try:
        done = subprocess.run([*command, "--json", result], capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return "not done in time", False
    said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    if done.returncode == 2 and any(m in done.stderr for m in MISFITS):
        return "does not fit", False
    if done.returncode != 0:
        return f"exit code {done.returncode}: {said}", True
    with open(result, encoding="utf-8") as f:
        return json.load(f)["throughput_tok_s"], False


def compare(name, measured):
    """Lines about a model, and whether it passes; measured is {flags: tokens per second, or why not}, of "--policy auto" too."""
    rates = {flags: x for flags, x in measured.items() if not isinstance(x, str)}
    lines = [f"{name}: {flags}: " + (f"{x:.1f} tokens/s" if flags in rates else x) for flags, x in measured.items()]
    auto = rates.pop("--policy auto", None)
    if auto is None:
        return [*lines, f"FAILED: {name}: --policy auto was not measured"], False
    if len(rates) < LEAST:
        return [*lines, f"FAILED: {name}: {len(rates)} policies were measured, at least {LEAST} are needed"], False
    best = max(rates, key=rates.get)
    ratio = auto / rates[best]
    lines.append(f"{name}: best {rates[best]:.1f} tokens/s ({best}), auto {auto:.1f}: ratio {ratio:.3f}")
    if ratio < 1 - TOLERANCE:
        lines.append(f"FAILED: {name}: auto is {100 * (1 - ratio):.1f} % slower than the best")
    return lines, ratio >= 1 - TOLERANCE


def main(moeserve, folder, seconds, layers, models, *arguments):
    os.makedirs(folder, exist_ok=True)
    passed, begin = True, time.monotonic()
    models = models.split(",")
    for i, model in enumerate(models):
        until = begin + float(seconds) * (i + 1) / len(models)
        of = [model, "--load-format", "dummy"] if model else []
        if int(layers) > 0 and model:
            of += ["--num-hidden-layers", layers]
        grid, load = (GRID, LOAD) if model else (LITTLE, LITTLE_LOAD)
        measured = {}
        for n, flags in enumerate(["--policy auto", *grid]):
            command = [moeserve, "bench", "throughput", *of, "--offload-fraction", "0.5", "--offload-tier", "host", *load, *flags.split(), *arguments]
            measured[flags], wrong = measure(command, os.path.join(folder, f"{model or 'built-in'}-{n}.json"), until)
            passed = passed and not wrong
        lines, near = compare(model or "built-in model", measured)
        passed = passed and near
        print("\n".join(lines), flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    if len(sys.argv) < 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
