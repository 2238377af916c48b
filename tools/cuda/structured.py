#!/usr/bin/env python3
"""Times completions of a running `moeserve serve` with and without a JSON schema, of 64 streams and of one.

    moeserve serve --model FOLDER --load-format dummy --device cuda --max-num-seqs 64 --max-model-len 2048
    python3 tools/cuda/structured.py [URL]

FOLDER has the config.json and the tokenizer.json of a model of at least 100,000 ids; random weights write random texts, so
masks are those of all places of the schema. Each case prints the wall time a token and the mean step. "first" is the first
request with its schema, whose masks are not known yet. Needs nothing but Python.
"""
import json
import random
import sys
import threading
import time
import urllib.request

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "status": {"enum": ["open", "paid", "shipped"]},
        "price": {"type": "number", "minimum": 0},
        "name": {"type": "string", "maxLength": 40},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["sku", "quantity", "status", "price", "name", "note"],
    "additionalProperties": False,
}
SCHEMA = {"structured_outputs": {"json": {"type": "array", "items": ITEM, "minItems": 60}}}


def ask(i, tokens, seed, extra, out):
    r = random.Random(seed * 1000 + i)
    body = {"prompt": [r.randrange(1000, 100000) for _ in range(64)], "max_tokens": tokens, "temperature": 1, "seed": r.randrange(1 << 30), "ignore_eos": True, **extra}
    q = urllib.request.Request(URL + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(q, timeout=120) as answer:
        out[i] = json.load(answer)["usage"]["completion_tokens"]


def steps():
    text = urllib.request.urlopen(URL + "/metrics").read().decode()
    value = lambda name: sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return value("moeserve_step_duration_seconds_sum"), value("moeserve_step_duration_seconds_count")


def case(name, tokens, seed, extra, streams=64):
    out, before, start = [0] * streams, steps(), time.time()
    threads = [threading.Thread(target=ask, args=(i, tokens, seed, extra, out)) for i in range(streams)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    took, after = time.time() - start, steps()
    mean = 1e3 * (after[0] - before[0]) / max(1, after[1] - before[1])
    print(f"{name}: {sum(out)} tokens in {took:.3f} s, {1e3 * took * streams / max(1, sum(out)):.3f} ms a token of {streams}, step {mean:.3f} ms", flush=True)


case("warm-up", 24, 1, {})
case("free", 256, 2, {})
case("schema, first", 256, 3, SCHEMA)
for k in range(4, 7):
    case("free", 256, k, {})
    case("schema", 256, k, SCHEMA)
for k in range(7, 9):
    case("free", 256, k, {}, 1)
    case("schema", 256, k, SCHEMA, 1)
