#!/usr/bin/env python3
"""Part of gpu.sh: a neighbor of moeserve on GPU 1, which has lent its memory to GPU 0.

    reclaim.py MOESERVE LIBRARY [HOST_GIB]

A PyTorch process that knows nothing of moeserve asks GPU 1 in one call for more than is free. Without the
preloaded LIBRARY (preload/reclaim.c) it is refused; with it it gets the memory, within LIMIT_MS; so does one
after `moeserve reclaim`. A generation that runs meanwhile has the same tokens as before. Then two moeserve
processes borrow from GPU 1, with too little for both: both get a part, and leave the headroom. Needs two GPUs
and PyTorch. PARTS='one two' are the parts; MODEL, LAYERS other sizes. The last lines are a table; a line with
FAILED says what does not hold.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

GIB = 1 << 30
LIMIT_MS = 500
MODEL, LAYERS = os.environ.get("MODEL", "mixtral-8x7b"), os.environ.get("LAYERS", "16")
# Long and varied, so that each prefill uses every expert.
PROMPT = [i * 7919 % 30000 + 3 for i in range(200)]
COMPUTE, PEER = os.environ.get("COMPUTE", "0"), os.environ.get("PEER", "1")
# Emulated devices, in place of GPUs: EMULATE=gpus=2,hbm=… for the second part, and to try the script.
EMULATE = os.environ.get("EMULATE", "")

failed = False
table = []


def fail(text):
    global failed
    failed = True
    print("FAILED", text, flush=True)


TENANT = """
import json, sys, time
import torch
torch.empty(1, device="cuda")
free, total = torch.cuda.mem_get_info()
want = free + int(sys.argv[1])
begin = time.perf_counter()
try:
    held = torch.empty(want, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    result = "ok"
except torch.cuda.OutOfMemoryError as e:
    result = "refused"
took = 1e3 * (time.perf_counter() - begin)
if result == "ok":
    held[:: 1 << 20] = 7
    torch.cuda.synchronize()
print(json.dumps({"result": result, "ms": took, "free": free, "want": want, "left": torch.cuda.mem_get_info()[0]}), flush=True)
sys.stdin.readline()
"""


class Tenant:
    """A PyTorch process on the peer, as its only GPU, which asks for so many bytes more than are free, and holds
    what it got until it is left."""

    def __init__(self, more, library=None, directory=None, conf=None):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": PEER}
        if library:
            env.update(LD_PRELOAD=library, MOESERVE_RUNTIME_DIR=directory, MOESERVE_RECLAIM_VERBOSE="1", MOESERVE_RECLAIM_DEADLINE_MS=str(LIMIT_MS))
        if conf:
            env["PYTORCH_CUDA_ALLOC_CONF"] = conf
        self.process = subprocess.Popen([sys.executable, "-c", TENANT, str(more)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def result(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.kill()
            raise RuntimeError(f"a tenant ended without a result: {self.process.stderr.read()[-2000:]}")
        return json.loads(line)

    def leave(self):
        self.process.stdin.close()
        said = self.process.stderr.read()
        self.process.wait(60)
        return [line for line in said.splitlines() if line.startswith("moeserve-reclaim")]


class Server:
    """moeserve serve on GPU 0, with all experts offloaded, and peer copies on GPU 1."""

    def __init__(self, binary, directory, host, *flags):
        devices = ["--device", "cpu", "--emulate", EMULATE] if EMULATE else ["--device", "cuda", "--gpu", COMPUTE, "--peers", PEER]
        self.process = subprocess.Popen(
            [binary, "serve", MODEL, "--load-format", "dummy", "--num-hidden-layers", LAYERS, *devices, "--offload-fraction", "1", "--port", "0",
             "--admin-address", "127.0.0.1:0", "--runtime-dir", directory, "--host-memory-gib", host, "--max-model-len", "1024",
             "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--log-level", "info", *flags], stderr=subprocess.PIPE, text=True)
        self.url = self.admin = None
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r'msg="admin address" address=(\S+)', line):
                self.admin = found[1]
            if found := re.search(r"msg=serving .*address=(\S+)", line):
                self.url = found[1]
                break
        if not self.url or not self.admin:
            raise RuntimeError(f"serve does not serve: {self.process.wait(30)} {''.join(self.log[-5:])}")
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def tokens(self, n):
        body = json.dumps({"prompt": PROMPT, "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True}).encode()
        r = urllib.request.Request(self.url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(r, timeout=300) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def borrowed(self):
        with urllib.request.urlopen(self.admin + "/harvest/borrowed", timeout=10) as answer:
            return json.load(answer)["devices"][0]

    def filled(self, least, seconds=90):
        """Runs requests until that much is borrowed."""
        end = time.time() + seconds
        while (now := self.borrowed()["borrowed_bytes"]) < least and time.time() < end:
            self.tokens(16)
        if now < least:
            fail(f"{now / GIB:.1f} GiB are borrowed after {seconds} s, want {least / GIB:.1f}")
        return now

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        if code := self.process.wait(60):
            self.reader.join(5)
            fail(f"serve ended with {code}: {''.join(self.log[-5:])}")


def generating(server, want, what, during):
    """Calls during while a generation runs, and compares its tokens with those of before."""
    got = []
    thread = threading.Thread(target=lambda: got.append(server.tokens(len(want))))
    thread.start()
    time.sleep(0.2)
    try:
        result = during()
        running = thread.is_alive()
    finally:
        thread.join()
    same = bool(got) and got[0] == want
    if not same:
        fail(f"{what}: tokens differ")
    return result, ("same" if same else "DIFFER") + ("" if running else " (the generation ended before)")


def row(what, asked, free, result, ms, tokens):
    table.append((what, f"{asked / GIB:.2f}", f"{free / GIB:.2f}", result, f"{ms:.0f}" if ms is not None else "–", tokens))


def one_process(binary, library, host, directory):
    server = Server(binary, directory, host, "--offload-tier", "peer", "--migration-limit", "0")
    full = server.borrowed()["borrowed_bytes"]
    print(f"{full / GIB:.2f} GiB are borrowed", flush=True)
    server.tokens(16)
    begin = time.time()
    server.tokens(64)
    # About 8 s, longer than a tenant takes to start.
    count = int(min(800, max(64, 64 * 8 / max(time.time() - begin, 0.01))))
    want = server.tokens(count)
    if server.tokens(count) != want:
        fail("two generations without a tenant differ")

    tenant = Tenant(min(10 * GIB, full // 2))
    r = tenant.result()
    tenant.leave()
    row("without the library", r["want"], r["free"], r["result"], r["ms"], "–")
    if r["result"] != "refused":
        fail(f"without the library: {r}")

    for what, more, conf, limit in (
        ("one call, 1 GiB more than is free", GIB, None, LIMIT_MS),
        ("one call, 10 GiB more", 10 * GIB, None, LIMIT_MS),
        ("one call, 30 GiB more", 30 * GIB, None, LIMIT_MS),
        ("one call, nearly all", full - 2 * GIB, None, LIMIT_MS),
        ("expandable segments, 10 GiB more", 10 * GIB, "expandable_segments:True", 8 * LIMIT_MS),
    ):
        if not 0 < more < full - GIB:
            continue

        def during():
            tenant = Tenant(more, library=library, directory=directory, conf=conf)
            return tenant, tenant.result()

        (tenant, r), same = generating(server, want, what, during)
        left = server.borrowed()
        if server.tokens(count) != want:
            fail(f"{what}: tokens differ beside the tenant")
        said = tenant.leave()
        for line in said[:3] + ["…"] * (len(said) > 6) + said[3:][-3:]:
            print(line, flush=True)
        row(what, r["want"], r["free"], r["result"], r["ms"], same)
        if r["result"] != "ok" or r["ms"] > limit:
            fail(f"{what}: {r}, want it within {limit} ms")
        print(f"{what}: {(full - left['borrowed_bytes'] - more) / GIB:.2f} GiB more were released than the tenant lacked; the headroom is among them", flush=True)
        server.filled(0.97 * full)

    free = server.borrowed()["free_bytes"]
    gib = free / GIB + min(30, full / GIB - 2)
    reclaimed, same = generating(server, want, "moeserve reclaim", lambda: subprocess.run(
        [binary, "reclaim", "--device", PEER, "--gib", f"{gib:.3f}", "--deadline", f"{LIMIT_MS}ms", "--runtime-dir", directory], capture_output=True, text=True))
    print(reclaimed.stdout + reclaimed.stderr, flush=True)
    found = re.search(r"in (\d+) ms", reclaimed.stdout)
    row("moeserve reclaim", gib * GIB, free, f"exit {reclaimed.returncode}", float(found[1]) if found else None, same)
    if reclaimed.returncode:
        fail(f"moeserve reclaim: exit {reclaimed.returncode}")
    server.filled(0.97 * full)
    server.end()


def two_processes(binary, host, directory):
    """Two processes that each want more than half of what the peer has for both: 3/4 of what one takes alone."""
    common = ("--offload-tier", "auto", "--gpu-memory-utilization", "0.4", "--migration-limit", "0")
    probe = Server(binary, directory, host, *common)
    last, end = -1, time.time() + 60
    while time.time() < end and ((b := probe.borrowed())["borrowed_bytes"] > last or last <= 0):
        last = b["borrowed_bytes"]
        for _ in range(8):
            probe.tokens(16)
    probe.end()
    share = last * 3 // 4
    room = b["free_bytes"] + b["borrowed_bytes"] - share
    print(f"one process takes {last / GIB:.2f} GiB; both are to share {share / GIB:.2f} GiB", flush=True)
    flags = (*common, "--harvest-headroom", str(room))
    first = Server(binary, directory, host, *flags)
    begin = time.time()
    while first.borrowed()["borrowed_bytes"] < 0.9 * share and time.time() < begin + 60:
        first.tokens(16)
    alone = first.borrowed()["borrowed_bytes"]
    second = Server(binary, directory, host, *flags)
    stop = threading.Event()

    def load(server):
        while not stop.is_set():
            server.tokens(16)

    threads = [threading.Thread(target=load, args=(s,)) for s in (first, second)]
    for t in threads:
        t.start()
    samples, begin = [], time.time()
    while time.time() < begin + 30:
        x, y = first.borrowed(), second.borrowed()
        samples.append((time.time() - begin, x["borrowed_bytes"], y["borrowed_bytes"], min(x["free_bytes"], y["free_bytes"])))
        time.sleep(0.1)
    stop.set()
    for t in threads:
        t.join()
    for at, x, y, free in samples[:: max(1, len(samples) // 15)]:
        print(f"{at:5.1f} s: first {x / GIB:6.2f} GiB, second {y / GIB:6.2f} GiB, free {free / GIB:6.2f} GiB, headroom {room / GIB:.2f} GiB", flush=True)
    tail = samples[len(samples) * 2 // 3 :]
    x, y = (sum(s[i] for s in tail) / len(tail) for i in (1, 2))
    row("two processes: the first alone, then both", share, room, f"{alone / GIB:.2f}; {x / GIB:.2f} and {y / GIB:.2f} GiB", None, "–")
    if min(x, y) < 0.3 * share:
        fail(f"two processes: one starves: {x / GIB:.2f} and {y / GIB:.2f} GiB of {share / GIB:.2f}")
    if (least := min(s[3] for s in tail)) < 0.97 * room:
        fail(f"two processes: the headroom of {room / GIB:.2f} GiB is not left: {least / GIB:.2f} GiB are free")
    first.end()
    second.end()


def main():
    binary, library = sys.argv[1:3]
    host = sys.argv[3] if len(sys.argv) > 3 else "0"
    for part in os.environ.get("PARTS", "one two").split():
        with tempfile.TemporaryDirectory() as directory:
            try:
                if part == "one":
                    one_process(binary, library, host, directory)
                else:
                    two_processes(binary, host, directory)
            except Exception as e:  # what has run is in the table all the same
                fail(f"{part}: {type(e).__name__}: {e}")
    print("| neighbor | asked, GiB | free before, GiB | result | ms | tokens |")
    print("|---|---|---|---|---|---|")
    for line in table:
        print("| " + " | ".join(line) + " |")
    sys.exit(failed)


main()
