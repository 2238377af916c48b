"""Digests of what a binary computes, to be compared between two commits:

    tools/digests.py MOESERVE >before.txt

For every fixture and for the built-in model, at several offload fractions and tiers: a digest over the generated ids
and over the log-probabilities of the likeliest tokens, printed in full, which are a function of all logits. Then
presets of one layer with dummy weights: the tokens' digest. On emulated devices, so that it runs everywhere; a change
that only moves code leaves every line as it was.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROMPTS = ("the expert moves from host to peer", "sort: t h e m o e =", "a", "123+456=")
CELLS = (("0", "host"), ("0.5", "host"), ("0.5", "peer"), ("1", "peer"))
# One layer of each is what a small machine holds.
PRESETS = ("phi-tiny-moe", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b")
PORT = 8971


def ask(body):
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def served(binary, model, fraction, tier):
    args = [binary, "serve", "--port", str(PORT), "--offload-fraction", fraction, "--offload-tier", tier, "--device", "cpu", "--log-level", "error"]
    server = subprocess.Popen(args + (["--model", str(model)] if model else []), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5) as answer:
                    name = json.load(answer)["data"][0]["id"]
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"{' '.join(args)}: exit {server.returncode}")
                time.sleep(0.05)
        else:
            sys.exit(f"{' '.join(args)}: no response")
        ids, logits = hashlib.sha256(), hashlib.sha256()
        # A model without a tokenizer takes ids.
        prompts = PROMPTS if not model or (model / "tokenizer.json").exists() else [[b % 64 for b in p.encode()] for p in PROMPTS]
        for prompt in prompts:
            for more in ({"temperature": 0}, {"temperature": 0.8, "seed": 7, "presence_penalty": 0.5}):
                got = ask({"model": name, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 5, **more})
                choice = got["choices"][0]
                ids.update(json.dumps([choice["text"], choice["logprobs"]["tokens"]]).encode())
                logits.update(json.dumps([choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]], sort_keys=True).encode())
        return ids.hexdigest()[:16], logits.hexdigest()[:16]
    finally:
        server.terminate()
        server.wait()


def main(binary):
    binary = str(pathlib.Path(binary).resolve())
    for model in [None, *sorted(p for p in (ROOT / "testdata" / "fixtures").iterdir() if any(p.glob("model*.safetensors")))]:
        for fraction, tier in CELLS:
            ids, logits = served(binary, model, fraction, tier)
            print(f"{model.name if model else 'built-in'} {fraction} {tier}: tokens {ids} log-probabilities {logits}", flush=True)
    for preset in PRESETS:
        for fraction, tier in CELLS[::2]:
            args = ["bench", "throughput", "--device", "cpu", "--model", preset, "--num-hidden-layers", "1", "--load-format", "dummy", "--num-prompts", "4",
                    "--input-len", "16", "--output-len", "4", "--trials", "1", "--warmup-tokens", "0", "--offload-fraction", fraction, "--offload-tier", tier]
            p = subprocess.run([binary, *args, "--json", "-"], cwd=ROOT, capture_output=True, text=True)
            if p.returncode:
                sys.exit(f"{' '.join(args)}: exit {p.returncode}: {p.stderr}")
            print(f"{preset} {fraction} {tier}: tokens {json.loads(p.stdout)['tokens_sha256'][:16]}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
