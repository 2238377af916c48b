"""Writes reference.json: digests of the reference's ids for long texts, which are other people's data and stay out.

    python3 -m venv venv && venv/bin/pip install tokenizers==0.23.3
    MOESERVE_TESTDATA=... venv/bin/python make_reference.py

A digest is the SHA-256 over ids as little-endian 32-bit integers; texts are those of longTexts in reference_test.go.
"""

import array
import hashlib
import json
import os
import pathlib
import sys

from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent
DATA = pathlib.Path(os.environ["MOESERVE_TESTDATA"])

dialogues = (DATA / "mtbench/mtbench101.jsonl").read_bytes()
mixed = dialogues[: 700 << 10].rsplit(b"\n", 1)[0].decode() + "\n"
strings = [v["s"] for v in json.loads((DATA / "tokenizers/qwen2/vectors.json").read_text())]
while len(mixed.encode()) < 1 << 20:
    mixed += "".join(s + "\n" for s in strings)
prompts = [t for line in (DATA / "mtbench/question.jsonl").read_text().splitlines() for t in json.loads(line)["turns"]]
prompts += [turn["user"] for line in dialogues.decode().splitlines() for turn in json.loads(line)["history"]]
texts = {"mixed": [mixed], "mtbench": prompts}


def digest(parts):
    h = hashlib.sha256()
    for p in parts:
        h.update(p)
    return h.hexdigest()


out = {"texts": {name: {"strings": len(t), "bytes": sum(len(s.encode()) for s in t), "sha256": digest(s.encode() for s in t)} for name, t in texts.items()}}
for family in ("mixtral", "phi3", "qwen2"):
    tok = Tokenizer.from_file(str(DATA / "tokenizers" / family / "tokenizer.json"))
    out[family] = {}
    for name, t in texts.items():
        ids = [array.array("I", tok.encode(s).ids) for s in t]
        for a in ids:
            if sys.byteorder == "big":
                a.byteswap()
        out[family][name] = {"tokens": sum(map(len, ids)), "sha256": digest(a.tobytes() for a in ids)}
(HERE / "reference.json").write_text(json.dumps(out, indent=1) + "\n")
