#!/usr/bin/env python3
"""moeserve's and vLLM's servers under the same load, on one machine: `moeserve bench serve` against each.

    python3 tools/cuda/serving.py MOESERVE MODEL OUT [--engines moeserve,vllm,peer] [--streams 324] [--rates 40,80,120]

MODEL is a folder with config.json and tokenizer files; weights are random. The engines, one after the other: moeserve and vllm with
everything in the first GPU's memory, peer: moeserve with half of the experts on the second GPU. Of each: --streams streams, one
request after another of 128 prompt tokens and 128 generated ones; then Poisson arrivals at each of --rates a second, for about
--seconds each. OUT gets the JSON of each run, and the table. A vLLM that is not installed is reported and left out.
"""
import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(engine, o, port):
    common = ["--max-num-seqs", str(o.streams), "--no-enable-prefix-caching", "--port", str(port)]
    if engine == "vllm":
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", o.model, "--load-format", "dummy",
                "--gpu-memory-utilization", "0.9", "--max-model-len", "1024", *common, *o.vllm.split()]
    flags = ["--offload-fraction", "0.5", "--offload-tier", "peer", "--peers", "1"] if engine == "peer" else []
    return [o.moeserve, "serve", o.model, "--load-format", "dummy", "--log-level", "warn", *common, *flags, *o.flags.split()]


def start(engine, o, port):
    env = dict(os.environ)
    if engine == "vllm":
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the server has an engine process of its own
    log = open(os.path.join(o.out, engine + ".log"), "w")
    began = time.time()
    server = subprocess.Popen(command(engine, o, port), stdout=log, stderr=log, env=env, start_new_session=True)
    while time.time() - began < o.start_limit:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            print(f"{engine}: ready after {time.time() - began:.0f} s", flush=True)
            return server
        except OSError:
            time.sleep(0.5)
    stop(server)
    print(f"{engine}: did not start, see {log.name}", flush=True)
    with open(log.name) as f:
        print("".join(f.readlines()[-15:]), flush=True)
    return None


def stop(server):
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, how)
        except ProcessLookupError:
            return
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            pass


def load(engine, name, o, port, args):
    out = os.path.join(o.out, f"{engine}-{name}.json")
    r = subprocess.run([o.moeserve, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--ignore-eos", "--input-len", "128", "--output-len", str(o.output_len),
                        "--json", out, *args], capture_output=True, text=True, timeout=300)
    if r.returncode:
        print(f"{engine} {name}: exit {r.returncode}: {r.stderr[-800:]}", flush=True)
        return None
    with open(out) as f:
        return json.load(f)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("moeserve")
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--engines", default="moeserve,vllm,peer")
    p.add_argument("--streams", type=int, default=324)
    p.add_argument("--output-len", type=int, default=128)
    p.add_argument("--rates", default="40,80,120")
    p.add_argument("--seconds", type=float, default=8)
    p.add_argument("--flags", default="--device cuda", help="further ones of moeserve serve")
    p.add_argument("--vllm", default="", help="further ones of vLLM")
    p.add_argument("--start-limit", type=float, default=240)
    o = p.parse_args()
    os.makedirs(o.out, exist_ok=True)
    rows, failed = [], False
    for engine in o.engines.split(","):
        port = free_port()
        server = start(engine, o, port)
        if server is None:
            failed = True
            continue
        try:
            load(engine, "warm-up", o, port, ["--num-prompts", str(o.streams), "--max-concurrency", str(o.streams), "--seed", "1"])
            runs = [("streams", ["--num-prompts", str(4 * o.streams), "--max-concurrency", str(o.streams), "--seed", "2"])]
            for rate in o.rates.split(","):
                runs.append((f"{rate}/s", ["--request-rate", rate, "--num-prompts", str(int(float(rate) * o.seconds)), "--seed", rate]))
            for name, args in runs:
                got = load(engine, name.replace("/", "-per-"), o, port, args)
                failed = failed or got is None or got["failed"] > 0
                if got:
                    rows.append((engine, name, got))
        finally:
            stop(server)
    print("| server | load | requests | failed | output tok/s | TTFT median, ms | p99 | TPOT median, ms | p99 | ITL median, ms | p99 | p99 / median |")
    print("|---" * 12 + "|")
    for engine, name, g in rows:
        print("| %s | %s | %d | %d | %.0f | %.1f | %.1f | %.2f | %.2f | %.2f | %.2f | %.2f |" % (
            engine, name, g["completed"], g["failed"], g["output_throughput"], g["median_ttft_ms"], g["p99_ttft_ms"], g["median_tpot_ms"], g["p99_tpot_ms"],
            g["median_itl_ms"], g["p99_itl_ms"], g["p99_itl_ms"] / max(g["median_itl_ms"], 1e-9)))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
