#!/usr/bin/env python3
"""Puts a short load on `moeserve serve` and compares every completion with `moeserve run`.

    python3 tools/cuda/serve_check.py MOESERVE [SECONDS] [FLAG...]

FLAGs go to both (--device cuda --offload-fraction 0.5 --batch-invariant). Needs nothing but Python.
"""
import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

CLIENTS = 32


def main():
    moeserve, seconds, flags = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    here = os.path.dirname(os.path.abspath(__file__))
    with gzip.open(os.path.join(here, "../../models/tiny/testdata/eval.jsonl.gz"), "rt") as f:
        questions = [json.loads(line) for line in f]
    prompts = [q["prompt"] for q in random.Random(1).sample(questions, 24)]
    want = {}
    for p in prompts:
        out = subprocess.run([moeserve, "run", "-q", "--raw", "--json", "-", *flags, p], capture_output=True, text=True, check=True)
        want[p] = json.loads(out.stdout)["text"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen([moeserve, "serve", "--port", str(port), "--log-level", "warn", *flags], stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(url + "/health/ready", timeout=5).read()
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"serve ended: {server.stderr.read()}")
                time.sleep(0.2)
        end, lock, counts, wrong = time.time() + seconds, threading.Lock(), [0, 0], []

        def client(i):
            rng = random.Random(i)
            while time.time() < end:
                p = rng.choice(prompts)
                body = {"prompt": p, "max_tokens": 32, "temperature": 0}
                if rng.random() < 0.3:  # neighbors that draw differently, and whose completions vary by seed
                    body.update(temperature=1.2, top_p=0.9, top_k=20, seed=rng.randrange(1 << 30), presence_penalty=0.5, logprobs=3)
                r = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
                with urllib.request.urlopen(r, timeout=120) as answer:
                    reply = json.load(answer)
                with lock:
                    counts[0] += 1
                    counts[1] += reply["usage"]["completion_tokens"]
                    if body["temperature"] == 0 and reply["choices"][0]["text"] != want[p]:
                        wrong.append((p, reply["choices"][0]["text"], want[p]))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        start = time.time()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        took = time.time() - start
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    print(f"{CLIENTS} clients, {took:.1f} s: {counts[0]} completions, {counts[1]} tokens ({counts[1] / took:.0f}/s), "
          f"{len(wrong)} differ from run, serve ended with {code}")
    for w in wrong[:5]:
        print("  %r: %r, run says %r" % w)
    sys.exit(1 if wrong or code or not counts[0] else 0)


if __name__ == "__main__":
    main()
