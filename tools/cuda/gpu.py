"""Part of gpu.sh.

    gpu.py cli MOESERVE   runs the binary on a GPU and checks what it prints
    gpu.py table LOGS     prints the times in presets.json and bench.log as Markdown
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe_clip", "phimoe_longrope")
TASKS = ("sort: t h e m o e =", "123+456=", "reverse: p e e r =", "recall: n=75 x=01 l=36 r=56; n=", "Zoe gave the orange clock to Ida. Who has the clock?")

failed = False


def fail(text):
    global failed
    failed = True
    print("FAILED", text, flush=True)


def moeserve(binary, *args, env=None):
    begin = time.time()
    try:
        p = subprocess.run([binary, *args], cwd=ROOT, capture_output=True, text=True, timeout=40, env={**os.environ, **(env or {})})
    except subprocess.TimeoutExpired as e:
        p = subprocess.CompletedProcess(e.cmd, 124, "", f"still running after {e.timeout} s; so far: {e.stderr}")
    return p, time.time() - begin


def ids(binary, *args):
    p, took = moeserve(binary, "run", "-q", "--json", "-", *args)
    if p.returncode:
        fail(f"{' '.join(args)}: exit {p.returncode}: {p.stderr.strip()}")
        return None, None, took
    result = json.loads(p.stdout)
    return result["token_ids"], result.get("text"), took


def cli(binary):
    for name in FIXTURES:
        common = ("--model", f"testdata/fixtures/{name}", "--ignore-eos", "--max-new-tokens", "20", "the expert moves from host to peer")
        got = {f: ids(binary, "--device", "cuda", "--offload-fraction", f, *common) for f in ("0", "0.75")}
        cpu = ids(binary, "--device", "cpu", *common)[0]
        tokens = {json.dumps(v[0]) for v in got.values()}
        if len(tokens) != 1:
            fail(f"{name}: tokens differ between fractions: {got}")
        gpu = got["0"][0] or []
        same = next((i for i, (a, b) in enumerate(zip(gpu, cpu or [])) if a != b), len(gpu))
        print(f"{name}: fractions 0 and 0.75 agree; the first {same} of {len(gpu)} tokens are the CPU's; {got['0'][2]:.1f} s a run", flush=True)
    for prompt in TASKS:
        answers = {}
        for device, f in (("cpu", "0"), ("cuda", "0"), ("cuda", "1")):
            answers[device, f] = ids(binary, "--device", device, "--offload-fraction", f, prompt)[1]
        if len(set(answers.values())) != 1:
            fail(f"built-in, {prompt!r}: {answers}")
        print(f"built-in: {prompt!r} -> {answers['cuda', '0']!r}", flush=True)
    preset = ("--model", "qwen1.5-moe-a2.7b", "--load-format", "dummy", "--num-hidden-layers", "4", "--prompt-ids", "1,2,3,4", "--ignore-eos",
              "--max-new-tokens", "8", "--max-model-len", "256")
    got = set()
    for f in ("0", "0.5", "1"):
        tokens, _, took = ids(binary, "--device", "cuda", "--offload-fraction", f, *preset)
        print(f"qwen1.5-moe-a2.7b, 4 layers, fraction {f}: {tokens}; {took:.1f} s", flush=True)
        got.add(json.dumps(tokens))
    if len(got) != 1:
        fail("the preset's tokens differ between fractions")
    p, took = moeserve(binary, "run", "--device", "cuda", "--offload-fraction", "0.5", TASKS[0])
    print(f"report of a run ({took:.1f} s):\n{p.stdout}{p.stderr}", flush=True)

    # (arguments, environment, exit code, what the error says)
    for args, env, code, want in (
        (["--device", "cuda", "--gpu", "63"], {}, 4, "GPU 63 asked for; this machine has"),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, 4, "CUDA_VISIBLE_DEVICES"),
        (["--device", "cuda", "--model", "mixtral-8x7b", "--load-format", "dummy", "--gpu-memory-utilization", "0.3", "--host-memory-gib", "120"],
         {}, 2, "it would fit"),
    ):
        prompt = ["--prompt-ids", "1"] if "mixtral-8x7b" in args else ["hello"]
        p, _ = moeserve(binary, "run", *args, *prompt, env=env)
        said = p.stderr.strip()
        print(f"exit {p.returncode}: {said}", flush=True)
        if p.returncode != code or want not in said or "\n" in said:
            fail(f"{args} {env}: exit {p.returncode}, want {code} and one line with {want!r}")
    if failed:
        sys.exit(1)


def milliseconds(seconds):
    return f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def table(logs):
    logs = pathlib.Path(logs)
    steps = logs / "presets.json"
    if steps.exists():
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        print("| model | layers | experts in host memory | step | sequences | rows | ms | floor, ms | share | tokens/s |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for r in rows:
            start = f"| {r['model']} | {r['layers']} | {100 * r['fraction']:.0f} % | {r['kind']} |"
            if r["kind"] == "load":
                print(f"{start} – | – | {1e3 * r['seconds']:.0f} | – | – | – |")
            else:
                print(f"{start} {r['sequences']} | {r['rows']} | {milliseconds(r['seconds'])} | {milliseconds(r['floor'])} | "
                      f"{100 * r['floor'] / r['seconds']:.0f} % | {r['rows'] / r['seconds']:,.0f} |")
        print()
    bench = logs / "bench.log"
    if bench.exists():
        found = re.findall(r"^BenchmarkKernels/model=(\S+?)/rows=(\d+)/(\S+?)(?:-\d+)?\s+\d+\s+(.*)$", bench.read_text(), re.M)
        if found:
            print("| kernel | model | rows | us | memory | products |")
            print("|---|---|---|---|---|---|")
        for model, count, name, metrics in found:
            v = {unit: float(x) for x, unit in re.findall(r"([\d.e+-]+) (\S+)", metrics)}
            print(f"| {name} | {model} | {count} | {v.get('us', 0):.1f} | {v.get('%memory', 0):.0f} % | {v.get('%product', 0):.0f} % |")


{"cli": cli, "table": table}[sys.argv[1]](sys.argv[2])
