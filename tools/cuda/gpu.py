"""Part of gpu.sh.

    gpu.py cli MOESERVE LOSE   runs the binary on a GPU and checks what it prints; LOSE is lose.c, built
    gpu.py table LOGS          prints the times in presets.json and bench.log as Markdown
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

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
    p, took = moeserve(binary, "run", "-q", "--raw", "--json", "-", *args)
    if p.returncode:
        fail(f"{' '.join(args)}: exit {p.returncode}: {p.stderr.strip()}")
        return [], None, took
    result = json.loads(p.stdout)
    return result["token_ids"], result.get("text"), took


def cli(binary, lose):
    collect_env(binary)
    for name in FIXTURES:
        common = ("--model", f"testdata/fixtures/{name}", "--ignore-eos", "--max-tokens", "20", "the expert moves from host to peer")
        got = {f: ids(binary, "--device", "cuda", "--offload-fraction", f, *common) for f in ("0", "0.75")}
        cpu = ids(binary, "--device", "cpu", *common)[0]
        gpu, other = got["0"][0], got["0.75"][0]
        if gpu != other:
            fail(f"{name}: tokens differ between fractions: {got}")
        if len(gpu) != 20 or len(cpu) != 20:
            fail(f"{name}: {len(gpu)} tokens on the GPU, {len(cpu)} on the CPU, want 20")
        same = next((i for i, (a, b) in enumerate(zip(gpu, cpu)) if a != b), min(len(gpu), len(cpu)))
        print(f"{name}: fractions 0 and 0.75 {'agree' if gpu == other else 'DIFFER'}; the first {same} of {len(gpu)} tokens are the CPU's; "
              f"{got['0'][2]:.1f} s a run", flush=True)
    for prompt in TASKS:
        answers = {}
        for device, f in (("cpu", "0"), ("cuda", "0"), ("cuda", "1")):
            answers[device, f] = ids(binary, "--device", device, "--offload-fraction", f, prompt)[1]
        if len(set(answers.values())) != 1:
            fail(f"built-in, {prompt!r}: {answers}")
            continue
        print(f"built-in: {prompt!r} -> {answers['cuda', '0']!r}", flush=True)
    preset = ("--model", "qwen1.5-moe-a2.7b", "--load-format", "dummy", "--num-hidden-layers", "4", "--prompt-ids", "1,2,3,4", "--ignore-eos",
              "--max-tokens", "8", "--max-model-len", "256")
    got = set()
    for f in ("0", "0.5", "1"):
        tokens, _, took = ids(binary, "--device", "cuda", "--offload-fraction", f, *preset)
        print(f"qwen1.5-moe-a2.7b, 4 layers, fraction {f}: {tokens}; {took:.1f} s", flush=True)
        got.add(json.dumps(tokens))
    if len(got) != 1:
        fail("the preset's tokens differ between fractions")
    p, took = moeserve(binary, "run", "--device", "cuda", "--offload-fraction", "0.5", TASKS[0])
    print(f"report of a run ({took:.1f} s):\n{p.stdout}{p.stderr}", flush=True)
    if p.returncode:
        fail(f"exit {p.returncode} of a run with a report")
    with tempfile.TemporaryDirectory() as dir:
        lost_run(binary, lose, pathlib.Path(dir))
        lost_serve(binary, lose, pathlib.Path(dir))
    # What was lost is that process's alone.
    tokens, _, took = ids(binary, "--device", "cuda", "--offload-fraction", "0.5", *preset)
    if json.dumps(tokens) not in got:
        fail(f"after devices were lost: tokens {tokens}, before {got}")
    print(f"a run after devices were lost: {tokens}; {took:.1f} s", flush=True)

    # (arguments, environment, exit code, what the error says)
    for args, env, code, want in (
        (["--device", "cuda", "--gpu", "63"], {}, 4, "GPU 63 asked for; this machine has"),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, 4, "CUDA_VISIBLE_DEVICES"),
        (["--device", "cuda", "--model", "mixtral-8x7b", "--load-format", "dummy", "--gpu-memory-utilization", "0.3", "--host-memory-gib", "120"],
         {}, 2, "--offload-fraction 0."),
    ):
        prompt = ["--prompt-ids", "1"] if "mixtral-8x7b" in args else ["hello"]
        p, _ = moeserve(binary, "run", *args, *prompt, env=env)
        said = p.stderr.strip()
        print(f"exit {p.returncode}: {said}", flush=True)
        if p.returncode != code or want not in said or "\n" in said:
            fail(f"{args} {env}: exit {p.returncode}, want {code} and one line with {want!r}")
    if failed:
        sys.exit(1)


def collect_env(binary):
    """What collect-env says of GPUs is what nvidia-smi says."""
    query = ["nvidia-smi", "--query-gpu=name,pci.bus_id,driver_version,memory.total", "--format=csv,noheader,nounits"]
    want = [line.split(", ") for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()]
    p, took = moeserve(binary, "collect-env")
    print(f"collect-env ({took:.1f} s): exit {p.returncode}\n{p.stdout}{p.stderr}", flush=True)
    lines = [line for line in p.stdout.splitlines() if line.startswith("GPU ")]
    j, _ = moeserve(binary, "collect-env", "--json", "-")
    if p.returncode or p.stderr or j.returncode or j.stderr:
        fail(f"collect-env: exit {p.returncode}, {p.stderr!r}; as JSON {j.returncode}, {j.stderr!r}")
        return
    said = json.loads(j.stdout)
    for what, got in (("collect-env", lines), ("its JSON", said["gpus"])):
        if len(got) != len(want):
            fail(f"{what} lists {len(got)} GPUs, nvidia-smi {len(want)}")
            continue
        for text, (name, bus, driver, total) in zip(got, want):
            # NVML has the domain of a bus in 4 digits, nvidia-smi in 8.
            for part in (name, bus[-12:], f"driver {driver},", f"of {int(total) / 1024:.2f} GiB used", "% busy", "PCIe ", "NVLinks"):
                if part.lower() not in text.lower():
                    fail(f"{what} does not say {part!r}: {text!r}")


def losing(binary, lose, at, *args):
    """Starts a process that loses its GPU when the file at is there."""
    return subprocess.Popen([binary, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "LD_PRELOAD": lose, "LOSE_AT": str(at)})


def until(stream, what):
    """Reads lines up to one with what; what was read, and whether it came."""
    lines = []
    for line in stream:
        lines.append(line)
        if what in line:
            return lines, True
    return lines, False


def ended(name, p, begin):
    """Holds a process that has lost its GPU to its exit code and its last words."""
    try:
        _, err = p.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        fail(f"{name}: still there 30 s after the device was lost")
        # Go prints what every goroutine is at.
        p.send_signal(signal.SIGQUIT)
        threading.Timer(5, p.kill).start()
        _, err = p.communicate()
    said = [line for line in err.splitlines() if line.startswith("moeserve: ")]
    print(f"{name}: exit {p.returncode}, {time.time() - begin:.1f} s after the device was lost: {said}", flush=True)
    if p.returncode != 4 or len(said) != 1 or "lost" not in said[0] or err.splitlines()[-1] != said[0]:
        fail(f"{name}: exit {p.returncode}, want 4 and one line at the end that says that the device is lost: {err!r}")


def lost_run(binary, lose, dir):
    """A run whose device is lost between its first token and its last."""
    p = losing(binary, lose, dir / "run", "run", "--device", "cuda", "--model", "qwen1.5-moe-a2.7b", "--load-format", "dummy",
               "--num-hidden-layers", "8", "--offload-fraction", "1", "--prompt-ids", "1,2,3", "--ignore-eos", "--max-tokens", "2000",
               "--max-model-len", "4096", "--log-level", "info")
    lines, ready = until(p.stderr, "model loaded")
    time.sleep(0.5)
    if not ready or p.poll() is not None:
        p.kill()
        fail(f"a run that is to lose its device is not there to lose it: {lines}")
        return
    (dir / "run").touch()
    ended("run", p, time.time())


def lost_serve(binary, lose, dir):
    """A server whose device is lost while requests run: each of them ends, with a response or an error."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    p = losing(binary, lose, dir / "serve", "serve", "--port", str(port), "--device", "cuda", "--offload-fraction", "0.5", "--log-level", "info")
    lines, ready = until(p.stderr, f":{port}")
    if not ready:
        fail(f"serve does not serve: {lines}")
        return
    # What is logged wants to be read.
    logged = []
    reader = threading.Thread(target=lambda: logged.extend(p.stderr), daemon=True)
    reader.start()
    answers, errors = [], []

    def client(i):
        while True:
            body = json.dumps({"prompt": TASKS[i % len(TASKS)], "max_tokens": 64, "min_tokens": 60}).encode()
            try:
                r = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"})
                with urllib.request.urlopen(r, timeout=20) as answer:
                    answers.append(answer.read())
            except urllib.error.HTTPError as e:
                errors.append(f"{e.code} {e.read().decode()}")
                if e.code != 503:
                    return
                time.sleep(0.05)
            except OSError as e:
                # A connection that was refused: the server has ended.
                errors.append("timeout" if isinstance(e, TimeoutError) or "timed out" in str(e) else "no server")
                return

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    end = time.time() + 20
    while len(answers) < 16 and not errors and time.time() < end:
        time.sleep(0.01)
    begin, before = time.time(), len(errors)
    (dir / "serve").touch()
    try:
        code = p.wait(30)
    except subprocess.TimeoutExpired:
        p.kill()
        code = p.wait()
    for t in threads:
        t.join(30)
    reader.join(10)
    said = [line.strip() for line in logged if line.startswith("moeserve: ")]
    refused = [e for e in errors if e.startswith("500")]
    print(f"serve: exit {code}, {time.time() - begin:.1f} s after the device was lost; {len(answers)} responses before, then {len(refused)} of 8 clients "
          f"were refused: {refused[:1]}; {said}", flush=True)
    if code != 4 or len(said) != 1 or "lost" not in said[0]:
        fail(f"serve: exit {code}, want 4 and one line that says that the device is lost: {''.join(logged[-5:])}")
    if before or len(answers) < 16 or not refused or "timeout" in errors or any(t.is_alive() for t in threads):
        fail(f"serve: {len(answers)} responses, then {errors}")


def milliseconds(seconds):
    return f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def access(r):
    """How a step of few tokens got at offloaded experts, unless that was left to the model and it copied them."""
    if r.get("access", "auto") != "auto":
        return f", {r['access']}"
    return f", {100 * r['direct']:.0f} % direct" if r.get("direct") else ""


def table(logs):
    logs = pathlib.Path(logs)
    steps = logs / "presets.json"
    if steps.exists():
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        print("| model | layers | offloaded | step | sequences | tokens | ms | roofline, ms | share of roofline | tokens/s |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for r in rows:
            start = f"| {r['model']} | {r['layers']} | {100 * r['fraction']:.0f} %, {r.get('tier', 'host')}{', not overlapped' if r.get('apart') else ''}{access(r)} | {r['kind']} |"
            if r["kind"] == "load":
                print(f"{start} – | – | {1e3 * r['seconds']:.0f} | – | – | – |")
            else:
                print(f"{start} {r['sequences']} | {r['rows']} | {milliseconds(r['seconds'])} | {milliseconds(r['roofline_s'])} | "
                      f"{100 * r['roofline_s'] / r['seconds']:.0f} % | {r['rows'] / r['seconds']:,.0f} |")
        print()
    bench = logs / "bench.log"
    if bench.exists():
        found = re.findall(r"^BenchmarkKernels/model=(\S+?)/rows=(\d+)/(\S+?)(?:-\d+)?\s+\d+\s+(.*)$", bench.read_text(), re.M)
        if found:
            print("| kernel | model | tokens | us | MB | GFLOP | share of memory rate | share of GEMM rate | share of a large GEMM beside |")
            print("|---|---|---|---|---|---|---|---|---|")
        for model, count, name, metrics in found:
            v = {unit: float(x) for x, unit in re.findall(r"([\d.e+-]+) (\S+)", metrics)}
            large = f"{v['%large']:.0f} %" if "%large" in v else "–"
            print(f"| {name} | {model} | {count} | {v.get('us', 0):.1f} | {v.get('MB', 0):.3g} | {v.get('GFLOP', 0):.3g} "
                  f"| {v.get('%memory', 0):.0f} % | {v.get('%product', 0):.0f} % | {large} |")


{"cli": cli, "table": table}[sys.argv[1]](*sys.argv[2:])
