#!/usr/bin/env python3
"""Part of gpu.sh: programs that know nothing of moeserve, with the library of preload/multipath.

    multipath.py LIBRARY LOSE_RELAY [PART...]

PyTorch programs copy between pinned host memory and GPU 0, with and without LIBRARY, whose relays are the other
GPUs. A line for each thing that must hold begins with PASS or FAIL; figures stand between them. Needs two GPUs,
PyTorch, and for the part models transformers. Parts:

    facts    what the driver does that the library's design rests on; rates that it could have at most
    rates    bandwidth by size, both directions, and what small copies cost, with and without LIBRARY
    program  the same bytes: many sizes, streams at once, graphs, threads, a DataLoader that forks
    ends     a program that ends without synchronizing; a relay without memory; a relay that is lost in
             mid-copy (LOSE_RELAY is the library with that fault), a process on it that is; a fault of a kernel
             in the relay's context, which ends the program with an error if the driver tells all contexts of it
    models   a transformers model of 3 GB from pinned memory to the GPU
    latency  what a small copy costs, by the driver alone after each thing that the library makes
             in it, and with PyTorch with parts of the library; how often its thread wakes; 40 s
    faults   (not by default) who in a process learns of a fault in one of its contexts; half a minute
    vllm     (not by default) vLLM's sleep mode, with MODEL, a folder with a config.json; about 2 minutes

RATE is what an engine of moeserve reaches with these GPUs, in GB/s, to compare with: by default what is reached
when GPUs copy their own data at the same time.
"""
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MIB, GIB = 1 << 20, 1 << 30
failed = False


def check(holds, what, detail=""):
    global failed
    failed |= not holds
    print(("PASS " if holds else "FAIL ") + what + (f": {detail}" if detail else ""), flush=True)
    return holds


# ---- programs that know nothing of moeserve: multipath.py child NAME ----


def warm(torch, host, device, gain=1.3, seconds=8):
    """Copies until copies are faster than the first ones, for at most so many seconds: relays open meanwhile."""
    def once():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    first, end = min(once() for _ in range(2)), time.time() + seconds
    while os.environ.get("MOESERVE_MULTIPATH_LOG") and time.time() < end and statistics.median(once() for _ in range(3)) > first / gain:
        time.sleep(0.05)
    for _ in range(8):
        once()


def child_rates():
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    warm(torch, host, device)
    result = {"bulk": {}, "small": {}}
    for size in (4, 8, 16, 32, 64, 256, 1024):
        for name, to, of in (("in", device, host), ("out", host, device)):
            a, b = to[: size * MIB], of[: size * MIB]
            for how in ("asynchronous", "synchronous"):
                times = []
                for _ in range(12):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    a.copy_(b, non_blocking=how == "asynchronous")
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - begin)
                result["bulk"][f"{size} MiB {name} {how}"] = size * MIB / statistics.median(times) / 1e9
    # Layers one after the other, as a program offloads them.
    for name, to, of in (("in", device, host), ("out", host, device)):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(16):
                to[i * 64 * MIB : (i + 1) * 64 * MIB].copy_(of[i * 64 * MIB : (i + 1) * 64 * MIB], non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        result["bulk"][f"16 x 64 MiB {name} asynchronous"] = GIB / statistics.median(times) / 1e9
    for kib in (1, 64, 1024, 8192):
        a, b = device[: kib << 10], host[: kib << 10]
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                a.copy_(b, non_blocking=True)
                torch.cuda.current_stream().synchronize()
            times.append((time.perf_counter() - begin) / 50)
        result["small"][f"{kib} KiB"] = 1e6 * min(times)
    print(json.dumps(result), flush=True)


def small_copies(torch, host, device):
    """Microseconds of a copy and a wait behind it, and of the copy's call alone, by size in KiB."""
    result = {}
    for kib in (1, 64, 1024):
        a, b, both, calls = device[: kib << 10], host[: kib << 10], [], []
        for _ in range(9):
            torch.cuda.synchronize()
            begin, inside = time.perf_counter(), 0.0
            for _ in range(100):
                t = time.perf_counter()
                a.copy_(b, non_blocking=True)
                inside += time.perf_counter() - t
                torch.cuda.current_stream().synchronize()
            both.append((time.perf_counter() - begin) / 100)
            calls.append(inside / 100)
        result[kib] = (1e6 * min(both), 1e6 * statistics.median(both), 1e6 * min(calls))
    return result


def wakes():
    """How often the library's thread has gone to sleep; None without one."""
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as f:
            if f.read().strip() != "moeserve-copies":
                continue
        with open(f"/proc/self/task/{task}/status") as f:
            return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", f.read(), re.M)[1])
    return None


def child_latency():
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    result = {"before large copies": small_copies(torch, host, device)}
    warm(torch, host, device, seconds=float(os.environ.get("WARM", "8")))
    time.sleep(0.1)
    slept = wakes()
    result["after them"] = small_copies(torch, host, device)
    # In a stream whose first copies these are, and in the default one again.
    with torch.cuda.stream(torch.cuda.Stream()):
        result["in a new stream"] = small_copies(torch, host, device)
    result["in the old one"] = small_copies(torch, host, device)
    print(json.dumps({"times": result, "wakes": None if slept is None else wakes() - slept, "cpus": len(os.sched_getaffinity(0))}), flush=True)


def child_ceiling():
    """All GPUs copy their own data at the same time."""
    import torch

    n = torch.cuda.device_count()
    hosts = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1) for _ in range(n)]
    devices = [torch.zeros(GIB, dtype=torch.uint8, device=f"cuda:{i}") for i in range(n)]
    result = {"gpus": n}
    for name in ("in", "out"):
        rates = []
        for _ in range(6):
            for i in range(n):
                torch.cuda.synchronize(i)
            begin = time.perf_counter()
            for i in range(n):
                a, b = (devices[i], hosts[i]) if name == "in" else (hosts[i], devices[i])
                a.copy_(b, non_blocking=True)
            for i in range(n):
                torch.cuda.synchronize(i)
            rates.append(n * GIB / (time.perf_counter() - begin) / 1e9)
        result[name] = statistics.median(rates)
    print(json.dumps(result), flush=True)


def child_beside():
    """Rates of copies of 1 GiB for three seconds."""
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    warm(torch, host, device, gain=float(os.environ.get("GAIN", "1.3")), seconds=4)
    rates, end = [], time.time() + 3
    while time.time() < end:
        begin = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(GIB / (time.perf_counter() - begin) / 1e9)
    print(json.dumps(rates[:8] + [statistics.median(rates[8:])]), flush=True)


def child_compete():
    """Copies on the link of the relay until standard input ends."""
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    done, begin = 0, time.perf_counter()
    print("copies", flush=True)
    while not stop.is_set():
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        done += 1
    print(f"{done * GIB / (time.perf_counter() - begin) / 1e9:.1f}", flush=True)


def pattern(torch, n, seed):
    """n bytes on the GPU, by a seed."""
    g = torch.Generator(device="cuda")
    g.manual_seed(seed)
    return torch.randint(-(1 << 61), 1 << 61, ((n + 7) // 8,), dtype=torch.int64, device="cuda", generator=g).view(torch.uint8)[:n]


def bring(torch, host):
    """Host bytes on the GPU, by copies too small to be relayed."""
    there = torch.empty(host.numel(), dtype=torch.uint8, device="cuda")
    for at in range(0, host.numel(), MIB):
        there[at : at + MIB].copy_(host[at : at + MIB])
    return there


def child_program():
    import random

    import torch
    from torch.utils.data import DataLoader, Dataset

    size = 512 * MIB
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    warm(torch, host, device)
    rng = random.Random(7)
    wrong = []
    # Sizes and offsets at random.
    for i in range(40):
        n = rng.randrange(1, size) if i % 4 else rng.choice((1, 17, MIB, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1, 100 * MIB + 3, size))
        at = rng.randrange(0, size - n + 1)
        want = pattern(torch, n, i)
        device[at : at + n].copy_(want)
        host[at : at + n].copy_(device[at : at + n], non_blocking=i % 2 == 0)
        torch.cuda.synchronize()
        if not torch.equal(bring(torch, host[at : at + n]), want):
            wrong.append(f"out {n}")
        device.zero_()
        device[at : at + n].copy_(host[at : at + n], non_blocking=i % 3 == 0)
        if not torch.equal(device[at : at + n], want) or bool(device[:at].any()) or bool(device[at + n :].any()):
            wrong.append(f"in {n}")
    check(not wrong, "40 sizes, both directions: the same bytes", ", ".join(wrong[:8]))

    # Streams at once, with work of unknown length before each copy, and work that uses it right behind.
    def chain(stream, rounds, seed, out):
        """Numbers go through host memory and back, and are compared on the device: nobody waits in between."""
        with torch.cuda.stream(stream):
            a = torch.empty(48 * MIB // 4, dtype=torch.int32, device="cuda")
            b = torch.zeros_like(a)
            middle = torch.empty(a.numel(), dtype=torch.int32, pin_memory=True)
            busy = torch.randn(3000, 3000, device="cuda")
            right = torch.ones((), dtype=torch.bool, device="cuda")
            for i in range(rounds):
                for _ in range((seed + i) % 4):
                    busy = (busy @ busy).clamp_(-1, 1)
                a.fill_(seed * 1000 + i)
                middle.copy_(a, non_blocking=True)
                a.fill_(-1)
                b.copy_(middle, non_blocking=True)
                right &= (b == seed * 1000 + i).all()
            stream.synchronize()
            out.append(bool(right))

    got = []
    chain(torch.cuda.default_stream(), 20, 1, got)
    chain(torch.cuda.Stream(), 20, 2, got)
    workers = [threading.Thread(target=chain, args=(torch.cuda.Stream(), 20, 3 + i, got)) for i in range(4)]
    workers.append(threading.Thread(target=chain, args=(torch.cuda.default_stream(), 20, 9, got)))
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    check(got == [True] * 7, "order in streams, default and not, from several threads", str(got))

    # A graph with copies inside, captured while another thread copies.
    small = torch.empty(64 * MIB // 4, dtype=torch.int32, pin_memory=True)
    inside, result = torch.zeros(small.numel(), dtype=torch.int32, device="cuda"), torch.zeros(small.numel(), dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        inside.copy_(small, non_blocking=True)
        torch.add(inside, 5, out=result)
    side.synchronize()
    copying, stop = torch.cuda.Stream(), threading.Event()

    def copy_beside():
        with torch.cuda.stream(copying):
            while not stop.is_set():
                device.copy_(host, non_blocking=True)
                time.sleep(0.02)

    beside = threading.Thread(target=copy_beside)
    torch.cuda.synchronize()
    beside.start()
    time.sleep(0.1)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            inside.copy_(small, non_blocking=True)
            torch.add(inside, 5, out=result)
        captured = ""
    except RuntimeError as e:
        captured = str(e)[:200]
    stop.set()
    beside.join()
    torch.cuda.synchronize()
    same = not captured
    for i in range(5 if same else 0):
        small.fill_(i)
        graph.replay()
        torch.cuda.synchronize()
        same &= bool((result == i + 5).all())
    check(same, "a graph with a copy inside, captured beside copies and replayed", captured)

    # Workers that are forked, and a thread that pins.
    class Numbers(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, i):
            return torch.arange(i, i + 6 * MIB // 4, dtype=torch.int32)

    seen, right = 0, True
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, pin_memory=True, multiprocessing_context="fork"):
        there = batch.to("cuda", non_blocking=True)
        for row in there:
            right &= bool((row == torch.arange(seen, seen + row.numel(), dtype=torch.int32, device="cuda")).all())
            seen += 1
    check(right and seen == 24, "a DataLoader with forked workers and pin_memory", f"{seen} items")

    # What the library leaves alone.
    pageable = torch.full((64 * MIB,), 3, dtype=torch.uint8)
    check(bool((pageable.to("cuda") == 3).all()), "pageable memory")
    other = device.clone()
    check(torch.equal(other, device), "a copy within the GPU")
    sys.exit(failed)


def child_exits():
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    warm(torch, host, device)
    for _ in range(20):
        device.copy_(host, non_blocking=True)


def child_copies():
    """Copies for some seconds and compares every byte; then touches the file LOSE_AT, if there is one, and goes on. An
    error of CUDA ends it with 3."""
    import torch

    done = {"rounds": 0, "wrong": 0}
    try:
        copy_and_compare(torch, done)
    except RuntimeError as e:
        print(json.dumps({**done, "error": str(e).splitlines()[0]}), flush=True)
        os._exit(3)
    print(json.dumps(done), flush=True)


def copy_and_compare(torch, done):
    size, begin = 256 * MIB, time.time()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    want = [pattern(torch, size, i) for i in range(2)]
    warm(torch, host, device, seconds=float(os.environ.get("WARM", "8")))
    at = os.environ.get("LOSE_AT")
    time.sleep(0.5)
    begin = time.time()
    while time.time() < begin + 2.5:
        if at and time.time() > begin + 1:
            open(at, "w").close()
        w = want[done["rounds"] % 2]
        for _ in range(4):
            host.copy_(w, non_blocking=True)
            device.zero_()
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        done["wrong"] += not torch.equal(device, w)
        done["rounds"] += 1


def child_victim():
    """A program of its own on the relay, which ends by a fault."""
    import torch

    end = time.time() + 30
    try:
        x = torch.ones(1 << 20, device="cuda")
        while time.time() < end:
            x = (x * 2).clamp_(0, 2)
            torch.cuda.synchronize()
    except RuntimeError:
        print("lost", flush=True)
        os._exit(0)


def child_fill():
    """Takes the memory of the GPU but for so many MiB, until standard input ends."""
    import torch

    torch.empty(1, device="cuda")
    held = []
    while (free := torch.cuda.mem_get_info()[0] - int(sys.argv[3]) * MIB) > 32 * MIB:
        held.append(torch.empty(min(free - 16 * MIB, 8 * GIB), dtype=torch.uint8, device="cuda"))
    print(torch.cuda.mem_get_info()[0] // MIB, flush=True)
    sys.stdin.readline()


def child_model():
    import torch
    import transformers

    config = transformers.Qwen2Config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=4,
                                      vocab_size=32000, max_position_embeddings=2048)
    torch.manual_seed(3)
    folder = sys.argv[3]
    if not os.path.exists(os.path.join(folder, "config.json")):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
    host = torch.empty(GIB // 2, dtype=torch.uint8, pin_memory=True)
    warm(torch, host, torch.zeros(GIB // 2, dtype=torch.uint8, device="cuda"))
    begin = time.perf_counter()
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    torch.cuda.synchronize()
    loaded = time.perf_counter() - begin
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    # One pinned block, as offloading keeps a model; its parameters are views.
    blocks = [(p, p.data.pin_memory()) for p in model.parameters()]
    for p, pinned in blocks:
        p.data = pinned
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        sums = [int(p.view(torch.int16).sum(dtype=torch.int64)) for p in model.parameters()]
        with torch.inference_mode():
            ids = model.generate(torch.arange(5, 25, device="cuda")[None], max_new_tokens=8, do_sample=False)[0].tolist()
        for p, pinned in blocks:
            p.data = pinned
    print(json.dumps({"bytes": size, "gbs": size / statistics.median(times) / 1e9, "load_s": loaded, "sums": sums, "ids": ids}), flush=True)


def child_vllm():
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(model=os.environ["MODEL"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, enforce_eager=True,
              enable_sleep_mode=True, gpu_memory_utilization=0.6, seed=0, disable_log_stats=True)

    def tokens():
        out = llm.generate([{"prompt_token_ids": list(range(10, 60))}], SamplingParams(temperature=0, max_tokens=16, detokenize=False), use_tqdm=False)
        return list(out[0].outputs[0].token_ids)

    want, times = tokens(), []
    for _ in range(4):
        torch.cuda.synchronize()
        a = time.perf_counter()
        llm.sleep(level=1)
        b = time.perf_counter()
        llm.wake_up()
        torch.cuda.synchronize()
        times.append((b - a, time.perf_counter() - b))
    print(json.dumps({"same": tokens() == want, "sleep_s": [t[0] for t in times], "wake_s": [t[1] for t in times], "tokens": want}), flush=True)


# ---- the parent ----


def run(name, *arguments, library=None, timeout=120, **env):
    """Runs a child, and returns what it printed, its exit code, and the library's report."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "report")
        environment = {**os.environ, **env}
        if library:
            environment.update(LD_PRELOAD=library, MOESERVE_MULTIPATH_LOG=log)
        try:
            p = subprocess.run([sys.executable, os.path.abspath(__file__), "child", name, *arguments], env=environment, capture_output=True, text=True,
                               timeout=timeout)
            out, err, code = p.stdout, p.stderr, p.returncode
        except subprocess.TimeoutExpired as e:
            out, err, code = (e.stdout or b"").decode(), (e.stderr or b"").decode(), -1
        report = open(log).read().strip() if os.path.exists(log) else ""
    if code:
        # Both ends: the first error says where it came up, the last what the process ended of.
        print(f"{name}: exit {code}\n{out[-1000:]}\n{err if len(err) < 4000 else err[:2000] + '...' + err[-2000:]}", flush=True)
    if report:
        print(report, flush=True)
    return out, code, report


def last_json(out):
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}


def relayed(report):
    found = re.search(r": (\d+) copies relayed, (\d+) bytes", report)
    return int(found[1]) if found else 0


def part_rates(library, _):
    ceiling = last_json(run("ceiling")[0])
    print(f"{ceiling.get('gpus')} GPUs that copy their own data at the same time: {ceiling.get('in', 0):.1f} GB/s in, {ceiling.get('out', 0):.1f} out", flush=True)
    native = last_json(run("rates")[0])
    ours, code, report = run("rates", library=library)
    ours = last_json(ours)
    if not check(bool(native and ours) and code == 0, "rates were measured"):
        return
    check(relayed(report) > 0, "copies of the CUDA runtime are relayed")
    print("| copy | native, GB/s | with the library, GB/s |\n|---|---|---|")
    for what, rate in native["bulk"].items():
        print(f"| {what} | {rate:.1f} | {ours['bulk'][what]:.1f} |")
    for what, us in native["small"].items():
        print(f"| {what}, latency | {us:.2f} us | {ours['small'][what]:.2f} us |", flush=True)
    for direction in ("in", "out"):
        best = float(os.environ.get("RATE", 0)) or ceiling[direction]
        rate = ours["bulk"][f"1024 MiB {direction} asynchronous"]
        check(rate >= 0.9 * best, f"1 GiB {direction} at 90 % of {best:.1f} GB/s", f"{rate:.1f}, native {native['bulk'][f'1024 MiB {direction} asynchronous']:.1f}")
    worst = min((ours["bulk"][w] / native["bulk"][w], w) for w in native["bulk"] if not w.startswith(("4 MiB", "8 MiB")))
    check(worst[0] > 0.95, "no size from the threshold on is slower than native by 5 %", f"{worst[1]}: {worst[0]:.2f}")
    competitor = subprocess.Popen([sys.executable, os.path.abspath(__file__), "child", "compete"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
    competitor.stdout.readline()
    # Relays are open once copies go over them, which need not make them faster here.
    rates = last_json(run("beside", library=library, MOESERVE_MULTIPATH_RELAYS="1", GAIN="1.1")[0])
    other = competitor.communicate("\n", timeout=60)[0].strip()
    if check(bool(rates), "copies beside a competitor were measured"):
        one = native["bulk"]["1024 MiB in asynchronous"]
        check(rates[-1] > one, "faster than native while another process copies on the relay's link", f"{rates[-1]:.1f} GB/s, native {one:.1f}; the other {other}; first copies "
              + ", ".join(f"{r:.0f}" for r in rates[:8]))


def part_program(library, _):
    global failed
    out, code, report = run("program", library=library, timeout=150)
    print(out, end="", flush=True)
    failed |= code != 0
    check(relayed(report) > 100, "of these copies many were relayed", str(relayed(report)))
    check(re.search(r" capture [1-9]", report) is not None and re.search(r" pageable [1-9]", report) is not None, "captured and pageable copies were left alone, and counted")


def part_ends(library, lose):
    out, code, report = run("exits", library=library)
    check(code == 0 and relayed(report) > 0, "a program that ends without synchronizing", f"exit {code}")
    with tempfile.TemporaryDirectory() as folder:
        at = os.path.join(folder, "now")
        out, code, report = run("copies", library=lose, LOSE_AT=at)
        r = last_json(out)
        check(code == 0 and r.get("wrong") == 0 and r["rounds"] > 4 and "is lost" in report, "a relay that is lost in mid-copy", f"{r}, exit {code}")
        at = os.path.join(folder, "fault")
        out, code, report = run("copies", library=lose, LOSE_AT=at, LOSE_BY="fault")
        r = last_json(out)
        survived, told = code == 0 and "is lost" in report, code == 3 and "CUDA error" in r.get("error", "")
        check((survived or told) and r.get("wrong") == 0 and r["rounds"] > 4, "a fault in the relay's context: no wrong byte, and the program "
              + ("gets the error" if told else "goes on" if survived else "fails otherwise"), f"{r}, exit {code}")
        fault = os.path.join(os.path.dirname(lose), "lose.so")
        if os.path.exists(fault):
            at = os.path.join(folder, "then")
            victim = subprocess.Popen([sys.executable, os.path.abspath(__file__), "child", "victim"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                      env={**os.environ, "CUDA_VISIBLE_DEVICES": "1", "LD_PRELOAD": fault, "LOSE_AT": at})
            out, code, report = run("copies", library=library, LOSE_AT=at)
            r = last_json(out)
            ended, _ = victim.communicate(timeout=60)
            check(code == 0 and r.get("wrong") == 0 and "is lost" not in report and relayed(report) > 0 and "lost" in ended, "another process on the relay that ends by a fault",
                  f"{r}, exit {code}, victim {ended.strip()!r}")
    filler = subprocess.Popen([sys.executable, os.path.abspath(__file__), "child", "fill", "900"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
    left = filler.stdout.readline().strip()
    out, code, report = run("copies", library=library, WARM="2", MOESERVE_MULTIPATH_RELAYS="1")
    r = last_json(out)
    check(code == 0 and r.get("wrong") == 0 and relayed(report) == 0 and "cannot be a relay" in report, f"a relay with {left} MiB of memory is not used", f"{r}, exit {code}")
    filler.stdin.close()
    filler.wait(30)


def part_latency(library, _):
    p = subprocess.run([sys.executable, os.path.abspath(__file__), "child", "stages"], timeout=60, capture_output=True, text=True)
    print(p.stdout + p.stderr[-2000:], end="", flush=True)
    check(p.returncode == 0, "latency by stages")
    print("| PyTorch | when | 1 KiB, least, us | median | call | 64 KiB, least, us | median | call | 1 MiB, least, us | median | call |\n" + "|---" * 11 + "|", flush=True)
    # The library that leaves all copies alone, for their size or for want of relays, and the one that relays; twice, since
    # processes differ by themselves.
    least = {}
    for _ in range(2):
        for what, options in (("native", {}), ("too small for the library", {"library": library, "MOESERVE_MULTIPATH_THRESHOLD": "64G", "WARM": "0"}),
                              ("without relays", {"library": library, "MOESERVE_MULTIPATH_RELAYS": "none", "WARM": "0"}), ("with relays", {"library": library})):
            got = last_json(run("latency", **options)[0])
            for when, by_size in got.get("times", {}).items():
                print(f"| {what} | {when} | " + " | ".join(f"{us:.2f}" for row in by_size.values() for us in row) + " |", flush=True)
                for size, row in by_size.items():
                    least[what, when, size] = min(row[0], least.get((what, when, size), row[0]))
            print(f"the library's thread slept {got.get('wakes')} times during these; {got.get('cpus')} CPUs", flush=True)
    added = [(round(least["with relays", when, size] - us, 2), size, when) for (what, when, size), us in least.items()
             if what == "native" and when != "before large copies" and ("with relays", when, size) in least]
    check(added and max(added)[0] < 2, "copies below the threshold take at most 2 us longer, least of two processes each", f"{max(added, default='nothing')}")


def driver():
    """CUDA's driver with GPU 0's primary context current: the library, call, which raises errors, made, which returns
    what a call writes through its first argument, and the context."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        result = getattr(cuda, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {result}")

    def made(name, *arguments, kind=ctypes.c_void_p):
        p = kind()
        call(name, ctypes.byref(p), *arguments)
        return p

    call("cuInit", 0)
    near = made("cuDevicePrimaryCtxRetain", 0)
    call("cuCtxSetCurrent", near)
    return cuda, call, made, near


def child_stages():
    """What a small copy costs by the driver alone, after each thing that the library makes in it."""
    cuda, call, made, near = driver()
    u64 = ctypes.c_uint64
    size = ctypes.c_size_t(64 * MIB)
    host, at = made("cuMemHostAlloc", size, 0), made("cuMemAlloc_v2", size, kind=u64)
    ctypes.memset(host, 1, size.value)
    enqueue, wait = cuda.cuMemcpyHtoDAsync_v2, cuda.cuStreamSynchronize
    print("| driver alone, after | 1 KiB: call and wait, us | 64 KiB | 1 MiB |\n|---|---|---|---|")

    def measure(what):
        call("cuCtxSetCurrent", near)
        row = []
        for n in (1 << 10, 64 << 10, MIB):
            bytes_, best = ctypes.c_size_t(n), (1e9, 0, 0)
            for _ in range(9):
                calls = waits = 0.0
                for _ in range(200):
                    a = time.perf_counter()
                    enqueue(at, host, bytes_, None)
                    b = time.perf_counter()
                    wait(None)
                    waits += time.perf_counter() - b
                    calls += b - a
                best = min(best, (calls + waits, calls, waits))
            row.append(f"{1e6 * best[1] / 200:.2f} + {1e6 * best[2] / 200:.2f}")
        print(f"| {what} | " + " | ".join(row) + " |", flush=True)

    measure("one context")
    measure("the same again")
    relay = made("cuCtxCreate_v2", 0, 1)
    far = made("cuMemAlloc_v2", size, kind=u64)
    there = made("cuStreamCreate", 1)
    measure("a context of GPU 1 with a stream and memory")
    call("cuCtxSetCurrent", relay)
    call("cuCtxEnablePeerAccess", near, 0)
    measure("its access to GPU 0")
    word = made("cuMemHostAlloc", ctypes.c_size_t(4096), 3)
    ctypes.memset(word, 0, 4096)
    stream, events = made("cuStreamCreate", 1), [made("cuEventCreate", 0) for _ in range(384)]
    measure("384 events, a stream, and a page for all contexts")
    call("cuEventRecord", events[0], None)
    call("cuStreamSynchronize", None)
    measure("an event in the stream")
    call("cuEventRecord", events[1], None)
    call("cuCtxSetCurrent", relay)
    call("cuStreamWaitEvent", there, events[1], 0)
    call("cuStreamSynchronize", there)
    measure("a wait of GPU 1 for an event of GPU 0")
    call("cuCtxSetCurrent", relay)
    call("cuMemcpyAsync", far, u64(host.value), size, there)
    call("cuMemcpyAsync", at, far, size, there)
    call("cuStreamSynchronize", there)
    measure("a copy of GPU 1 to GPU 0")
    call("cuCtxSetCurrent", relay)
    call("cuStreamWriteValue32_v2", there, u64(word.value), 1, 0)
    call("cuStreamSynchronize", there)
    measure("a word that GPU 1 wrote")
    call("cuStreamWaitValue32_v2", stream, u64(word.value), 1, 0)
    call("cuStreamSynchronize", stream)
    measure("a wait for it in another stream")
    call("cuStreamWaitValue32_v2", None, u64(word.value), 1, 0)
    call("cuStreamSynchronize", None)
    measure("a wait for it in the stream")
    call("cuCtxDestroy_v2", relay)
    measure("the end of the context of GPU 1")


def child_fault():
    """GPU 1's context of a process has a fault: what calls for GPU 0's return then. Arguments: write or trap, peer or
    alone, idle, copying or waiting. Numbers are results of the driver, 0 is success."""
    kind, access, busy = sys.argv[3:6]
    cuda, call, made, near = driver()
    ptr, u64 = ctypes.c_void_p, ctypes.c_uint64
    size = ctypes.c_size_t(256 * MIB)
    host, at, stream = made("cuMemHostAlloc", size, 1), made("cuMemAlloc_v2", size, kind=u64), made("cuStreamCreate", 1)
    word = made("cuMemHostAlloc", ctypes.c_size_t(4096), 3)
    ctypes.memset(word, 0, 4096)
    ctypes.memset(host, 5, size.value)
    relay = made("cuCtxCreate_v2", 0, 1)
    if access == "peer":
        call("cuCtxEnablePeerAccess", near, 0)
    far, streams = made("cuMemAlloc_v2", size, kind=u64), [made("cuStreamCreate", 1) for _ in range(2)]
    module = made("cuModuleLoadData", b".version 7.0\n.target sm_80\n.address_size 64\n"
                  b".visible .entry write(.param .u64 to) {\n .reg .b64 %at;\n .reg .b32 %value;\n"
                  b" ld.param.u64 %at, [to];\n mov.u32 %value, 1;\n st.global.u32 [%at], %value;\n ret;\n}\n"
                  b".visible .entry trap(.param .u64 to) {\n trap;\n ret;\n}\n\0")
    functions = {name: made("cuModuleGetFunction", module, name.encode()) for name in ("write", "trap")}

    def launch(name, address):
        to = u64(address)
        call("cuLaunchKernel", functions[name], 1, 1, 1, 1, 1, 1, 0, streams[1], (ctypes.c_void_p * 1)(ctypes.addressof(to)), None)

    launch("write", far.value)
    call("cuStreamSynchronize", streams[1])
    waited, begin = {}, time.perf_counter()
    if busy == "waiting":
        def wait():
            cuda.cuCtxSetCurrent(near)
            cuda.cuStreamWaitValue32_v2(stream, u64(word.value), 1, 0)
            waited["result"] = cuda.cuStreamSynchronize(stream)
            waited["after"] = time.perf_counter() - begin

        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.2)
    if busy == "copying":
        for _ in range(50):
            call("cuMemcpyPeerAsync", at, near, far, relay, size, streams[0])
    begin = time.perf_counter()
    launch(kind, 1024)
    time.sleep(0.2)

    def near_says():
        back, event, n = (ctypes.c_char * 4096)(), ptr(), ctypes.c_size_t(MIB)
        said = [("current", cuda.cuCtxSetCurrent(near)), ("query", cuda.cuStreamQuery(stream)), ("event", cuda.cuEventCreate(ctypes.byref(event), 0))]
        if busy != "waiting":
            said += [("in", cuda.cuMemcpyHtoD_v2(at, host, n)), ("out", cuda.cuMemcpyDtoH_v2(back, at, ctypes.c_size_t(4096))),
                     ("synchronize", cuda.cuCtxSynchronize())]
            said.append(("bytes", "right" if bytes(back) == b"\x05" * 4096 else "not there"))
        return " ".join(f"{what} {result}" for what, result in said)

    print(f"{kind} {access} {busy}: GPU 0 before GPU 1 is asked: {near_says()}", flush=True)
    # What the library does there, and whether the context of before is current again.
    popped, current = ptr(), ptr()
    said = [("push", cuda.cuCtxPushCurrent_v2(relay)), ("query", cuda.cuStreamQuery(streams[0])), ("pop", cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))),
            ("get", cuda.cuCtxGetCurrent(ctypes.byref(current)))]
    print(f"  GPU 1: {' '.join(f'{what} {result}' for what, result in said)}, GPU 0 is {'' if current.value == near.value else 'not '}current then; "
          f"set {cuda.cuCtxSetCurrent(relay)} synchronize {cuda.cuCtxSynchronize()} set back {cuda.cuCtxSetCurrent(near)}", flush=True)
    print(f"  GPU 0 then: {near_says()}", flush=True)
    if busy == "waiting":
        time.sleep(1)
        print(f"  cuStreamSynchronize of GPU 0, in progress since before, after a second: {waited or 'still waits'}", flush=True)
        ctypes.c_uint32.from_address(word.value).value = 1
        time.sleep(0.5)
        print(f"  and after the word that its stream waits for was written: {waited or 'still waits'}", flush=True)
    os._exit(0)


def part_faults(*_):
    cases = [(kind, access, busy) for busy in ("idle", "copying") for access in ("alone", "peer") for kind in ("write", "trap")]
    for case in cases + [("write", "peer", "waiting")]:
        try:
            p = subprocess.run([sys.executable, os.path.abspath(__file__), "child", "fault", *case], timeout=20, capture_output=True, text=True)
            print(p.stdout + (p.stderr[-1000:] if p.returncode else ""), end="", flush=True)
        except subprocess.TimeoutExpired as e:
            print((e.stdout or b"").decode() + f"{' '.join(case)}: no end within 20 s", flush=True)


def part_models(library, _):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        native = last_json(run("model", folder)[0])
        out, code, report = run("model", folder, library=library)
        ours = last_json(out)
    if not check(bool(native and ours) and code == 0, "a transformers model was loaded"):
        return
    check(native["sums"] == ours["sums"] and native["ids"] == ours["ids"], "its parameters and tokens are the same")
    print(f"from pinned memory to the GPU, {ours['bytes'] / 1e9:.2f} GB: {native['gbs']:.1f} GB/s native, {ours['gbs']:.1f} with the library; "
          f"from_pretrained and to the GPU (pageable) {native['load_s']:.2f} s and {ours['load_s']:.2f} s", flush=True)
    check(ours["gbs"] > 1.2 * native["gbs"], "it goes faster from pinned memory", f"{ours['gbs'] / native['gbs']:.2f} x")


def part_vllm(library, _):
    native = last_json(run("vllm", timeout=240)[0])
    out, code, report = run("vllm", library=library, timeout=240, MOESERVE_MULTIPATH_MAPPED="1")
    ours = last_json(out)
    if not check(bool(native and ours) and code == 0, "vLLM slept and woke"):
        return
    check(ours["same"] and ours["tokens"] == native["tokens"], "vLLM's tokens are the same")
    for what in ("sleep_s", "wake_s"):
        print(f"{what}: native {statistics.median(native[what][1:]):.3f}, with the library {statistics.median(ours[what][1:]):.3f}", flush=True)


def part_facts(*_):
    """What the design rests on, by the driver alone: see the head of preload/multipath/copy.c."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        result = getattr(cuda, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {result}")

    ptr, u64 = ctypes.c_void_p, ctypes.c_uint64
    call("cuInit", 0)
    contexts = [ptr() for _ in range(2)]
    for i, c in enumerate(contexts):
        call("cuDevicePrimaryCtxRetain", ctypes.byref(c), i)

    def enter(i):
        call("cuCtxSetCurrent", contexts[i])

    def made(name, *arguments):
        p = ptr()
        call(name, ctypes.byref(p), *arguments)
        return p

    enter(0)
    streams = [made("cuStreamCreate", 1) for _ in range(2)]
    word = ptr()
    call("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(4096), 3)
    flag = ctypes.c_uint32.from_address(word.value)
    size = 256 * MIB
    host = ptr()
    call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), 0)
    ctypes.memset(host, 1, size)
    near, scratch = u64(), u64()
    call("cuMemAlloc_v2", ctypes.byref(near), ctypes.c_size_t(size))
    def attributes(where):
        for at, name in ((near, "GPU 0"), (u64(host.value), "pinned")):
            values = []
            for attribute in (1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 16, 17, 18, 19):
                v = u64()
                result = cuda.cuPointerGetAttribute(ctypes.byref(v), attribute, at)
                values.append(f"{attribute}={v.value:#x}" if result == 0 else f"{attribute}: error {result}")
            print(f"pointer attributes of {name} memory {where}: {' '.join(values)}", flush=True)

    attributes("in its own context")
    relay, popped = ptr(), ptr()
    call("cuCtxCreate_v2", ctypes.byref(relay), 0, 1)
    attributes("in a context of GPU 1 without peer access")
    call("cuCtxEnablePeerAccess", contexts[0], 0)
    attributes("in one with")
    call("cuCtxPopCurrent_v2", ctypes.byref(popped))
    call("cuCtxDestroy_v2", relay)
    enter(0)
    # A stream waits for the host; meanwhile one thread frees memory, and another enqueues on another stream.
    ptx = (b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n\0")

    def meanwhile(what, begin):
        took = {}

        def other():
            enter(0)
            t = time.perf_counter()
            begin()
            took["it"] = time.perf_counter() - t

        flag.value = 0
        call("cuStreamWaitValue32_v2", streams[0], u64(word.value), 1, 0)
        threads = [threading.Thread(target=other)]
        threads[0].start()
        time.sleep(0.05)

        def enqueue():
            enter(0)
            t = time.perf_counter()
            call("cuMemcpyHtoDAsync_v2", near, host, ctypes.c_size_t(MIB), streams[1])
            took["enqueueing"] = time.perf_counter() - t

        threads.append(threading.Thread(target=enqueue))
        threads[1].start()
        time.sleep(0.3)
        flag.value = 1
        for t in threads:
            t.join()
        call("cuCtxSynchronize")
        print(f"while a stream waits for the host, {what} takes {1e3 * took['it']:.2f} ms, and beside it enqueueing a copy on another stream "
              f"{1e3 * took['enqueueing']:.2f} ms (the host answers after 350)", flush=True)

    call("cuMemAlloc_v2", ctypes.byref(scratch), ctypes.c_size_t(64 * MIB))
    meanwhile("cuMemFree", lambda: call("cuMemFree_v2", scratch))
    meanwhile("cuModuleLoadData", lambda: made("cuModuleLoadData", ptx))
    pinned = made("cuMemHostAlloc", ctypes.c_size_t(MIB), 0)
    meanwhile("cuMemFreeHost", lambda: call("cuMemFreeHost", pinned))
    meanwhile("cuCtxSynchronize", lambda: call("cuCtxSynchronize"))
    # A relay that needs no buffer: its stream copies from the host to its peer's memory.
    enter(1)
    cuda.cuCtxEnablePeerAccess(contexts[0], 0)
    stream, events = made("cuStreamCreate", 1), [made("cuEventCreate", 0) for _ in range(2)]
    for what, to, of in (("host to peer", near.value, host.value), ("peer to host", host.value, near.value)):
        rates = []
        for _ in range(5):
            call("cuEventRecord", events[0], stream)
            call("cuMemcpyAsync", u64(to), u64(of), ctypes.c_size_t(size), stream)
            call("cuEventRecord", events[1], stream)
            call("cuStreamSynchronize", stream)
            ms = ctypes.c_float()
            call("cuEventElapsedTime", ctypes.byref(ms), *events)
            rates.append(size / ms.value / 1e6)
        print(f"{what} in one copy of the relay's stream, without a buffer: {statistics.median(rates):.1f} GB/s", flush=True)


def main():
    if sys.argv[1:2] == ["child"]:
        globals()["child_" + sys.argv[2]]()
        return
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    library, lose = (os.path.abspath(p) for p in sys.argv[1:3])
    for part in sys.argv[3:] or ["facts", "rates", "latency", "program", "ends", "models"]:
        begin = time.time()
        print(f"--- {part}", flush=True)
        try:
            if part == "facts":  # in a process of its own, which may hang
                p = subprocess.run([sys.executable, os.path.abspath(__file__), "child", "facts"], timeout=60, capture_output=True, text=True)
                print(p.stdout + p.stderr[-2000:], end="", flush=True)
                check(p.returncode == 0, "facts of the driver")
            else:
                globals()["part_" + part](library, lose)
        except Exception as e:  # what has run is printed all the same
            check(False, part, f"{type(e).__name__}: {e}")
        print(f"--- {part}: {time.time() - begin:.0f} s", flush=True)
    print("FAILED" if failed else "all hold", flush=True)
    sys.exit(failed)


child_facts = part_facts

if __name__ == "__main__":
    main()
