"""Writes tiny_bytefallback.json and variants.json: small tokenizers with every feature, and what the reference makes of
random text and ids with them.

    python3 -m venv venv && venv/bin/pip install tokenizers==0.23.3
    venv/bin/python make_variants.py

A variant is a base tokenizer with some keys replaced (those of "model" one by one). Ids of cases are what the reference
gives, "sp" those with special tokens, "d" random ids and "dec"/"decs" their text without and with skipping specials.
"""

import copy
import json
import pathlib
import random
import sys

from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

HERE = pathlib.Path(__file__).parent
random.seed(20)

SENTENCES = [
    "the expert moves from host to peer while the cold cache holds a router",
    "tokens leave the queue, and the next layer's experts stream into the ring",
    "a handle carries a device, a pointer, its size; Größe, naïve façade, coöperate",
    "12345 + 67890 = 80235, (a[i] != b[j]) && !done // comment",
    "def step(self, x):\n    return x * 2  # twice\n\n\tindent",
    "привет мир, 你好世界, こんにちは, שלום, नमस्ते",
]


def bytefallback():
    """A small tokenizer in the shape of Mixtral's, trained on the sentences above."""
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tok.train_from_iterator(SENTENCES[:5] * 3, trainers.BpeTrainer(vocab_size=480, special_tokens=special, limit_alphabet=90, show_progress=False))
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    d = json.loads(tok.to_str())
    d["added_tokens"] = [a for a in d["added_tokens"] if a["id"] < 3]
    # Spaces inside words, so that not every boundary may be cut.
    at = max(d["model"]["vocab"].values()) + 1
    for left, right in (("▁", "▁"), ("▁▁", "▁▁"), ("e", "▁")):
        if left + right not in d["model"]["vocab"]:
            d["model"]["vocab"][left + right] = at
            at += 1
        d["model"]["merges"].append([left, right])
    return d


def added(id, content, **flags):
    return dict(dict(id=id, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=False), **flags)


def next_id(d):
    return max([*d["model"]["vocab"].values(), *(a["id"] for a in d["added_tokens"])]) + 1


def odd_added(d):
    """Added tokens with all flags."""
    at, out = next_id(d), list(d["added_tokens"])
    for i, content in enumerate(["cache", "ca", "<x>", "  ", "word", "\n", "Ġ", "é"]):
        out.append(added(at + i, content, lstrip=bool(i & 1), rstrip=i % 3 == 0, single_word=i in (0, 1, 4), normalized=i == 4, special=i == 5))
    return {"added_tokens": out}


def olmoe(d):
    """OLMoE's shape: NFC, runs of spaces as normalized added tokens."""
    at, out = next_id(d), list(d["added_tokens"])
    for i in range(2, 8):
        out.append(added(at, " " * i, normalized=True))
        at += 1
    out.append(added(at, "|||IP|||", normalized=True))
    return {"normalizer": {"type": "NFC"}, "added_tokens": out}


def metaspace(scheme, split):
    pre = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    return lambda d: {"normalizer": None, "pre_tokenizer": pre}


def byte_level(**flags):
    pre = dict({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, **flags)
    return lambda d: {"pre_tokenizer": pre}


def split(pattern):
    pre = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    pre.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False})
    return lambda d: {"pre_tokenizer": {"type": "Sequence", "pretokenizers": pre}, "normalizer": {"type": "NFC"}}


def model(**keys):
    return lambda d: {"model": keys}


def missing_bytes(d):
    """A vocabulary without the byte tokens that two characters need."""
    vocab = {("<no" + t[1:] if t in ("<0xE4>", "<0xC3>") else t): i for t, i in d["model"]["vocab"].items()}
    return {"model": {"vocab": vocab}}


def missing_chars(d):
    """A byte-level vocabulary without some bytes, and an unknown token."""
    used = {t for m in d["model"]["merges"] for t in m}
    chars = [t for t in d["model"]["vocab"] if len(t) == 1 and ord(t) > 0x100 and t not in used][:12]
    vocab = {("no" + t if t in chars else t): i for t, i in d["model"]["vocab"].items()}
    return {"model": {"vocab": vocab, "unk_token": "a"}}


def templates(d):
    token = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    end = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    a = {"Sequence": {"id": "A", "type_id": 0}}
    b = {"Sequence": {"id": "B", "type_id": 1}}
    table = {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]},
        "<|im_end|>": {"id": "<|im_end|>", "ids": [2, 0], "tokens": ["<|im_end|>", "x"]},
    }
    byte = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    post = {"type": "TemplateProcessing", "single": [token, a, end], "pair": [a, b], "special_tokens": table}
    return {"post_processor": {"type": "Sequence", "processors": [byte, post]}}


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VARIANTS = [
    ("tiny", "plain", lambda d: {}),
    ("tiny", "qwen2", split(QWEN2)),
    ("tiny", "gpt2 split", split(GPT2)),
    ("tiny", "olmoe", olmoe),
    ("tiny", "odd added", odd_added),
    ("tiny", "prefix space", byte_level(add_prefix_space=True)),
    ("tiny", "no regex", byte_level(use_regex=False)),
    ("tiny", "no decoder", lambda d: {"decoder": None}),
    ("tiny", "ignore merges", model(ignore_merges=True)),
    ("tiny", "missing characters", missing_chars),
    ("tiny", "templates", templates),
    ("bytefallback", "plain", lambda d: {}),
    ("bytefallback", "odd added", odd_added),
    ("bytefallback", "no fallback", model(byte_fallback=False)),
    ("bytefallback", "no fallback, no fuse", model(byte_fallback=False, fuse_unk=False)),
    ("bytefallback", "missing bytes", missing_bytes),
    ("bytefallback", "ignore merges", model(ignore_merges=True)),
    ("bytefallback", "old merges", lambda d: {"model": {"merges": [" ".join(m) for m in d["model"]["merges"]]}}),
] + [("bytefallback", f"metaspace {s}, split {p}", metaspace(s, p)) for s in ("first", "always", "never") for p in (False, True)]

MARKS = [0x300, 0x301, 0x323, 0x334, 0x345, 0x5B0, 0x64B, 0x93C, 0x1DFA, 0x8CA, 0x20D0, 0x1E000]


def piece(tokens):
    x = random.random()
    words = " ".join(SENTENCES).split()
    if x < 0.3:
        return random.choice(words) + random.choice(["", " ", " ", "  ", "\n"])
    if x < 0.4:
        return random.choice(" \n\r\t\u00a0\u2003\u3000\x85") * random.choice([1, 1, 2, 3, 7])
    if x < 0.48:
        return random.choice(["'s", "'S", "'re", "'VE", "'ll", "'\u017f", "'D", "\u2019s", "'"])
    if x < 0.56:
        return chr(random.choice(MARKS)) * random.choice([1, 1, 2])
    if x < 0.62:
        return random.choice(["\u1100\u1161\u11a8", "\uac00\u11a8", "e\u0301", "\u0344", "q\u0323\u0307", "\ufb01", "\U00011935\U00011930", "\u212b"])
    if x < 0.68:
        return chr(random.choice([*range(0x21, 0xD800), *range(0xE000, 0x32000)]))
    if x < 0.72:
        return random.choice("0123456789²½٣४") * random.choice([1, 3])
    if x < 0.8:
        return random.choice(".,;:!?()[]{}<>|/\\\"`~@#$%^&*-_=+▁Ġ")
    if x < 0.92:
        return random.choice(tokens)
    return random.choice(["😀👩‍👩‍👧", "ﷺ", "<0x0A>", "<s>", "</s>", "𐐷", "ꟑ", "𞓐", "\U0002EBF0", "\U00010D40", "\u1c89"])


def case(tok, tokens, normalized):
    text = "".join(piece(tokens) for _ in range(random.choice([0, 1, 2, 3, 5, 10, 25])))
    if random.random() < 0.04:
        text += "a" + "".join(chr(random.choice(MARKS)) for _ in range(random.randrange(25, 70)))
    size = tok.get_vocab_size()
    d = [random.choice([random.randrange(size + 20), random.randrange(min(size, 300))]) for _ in range(random.randrange(12))]
    d = [i for i in d if i not in normalized]
    return {
        "s": text,
        "ids": tok.encode(text, add_special_tokens=False).ids,
        "sp": tok.encode(text).ids,
        "d": d,
        "dec": tok.decode(d, skip_special_tokens=False),
        "decs": tok.decode(d, skip_special_tokens=True),
    }


bases = {"tiny": json.loads((HERE / "tiny_tokenizer.json").read_text()), "bytefallback": bytefallback()}
(HERE / "tiny_bytefallback.json").write_text(json.dumps(bases["bytefallback"], ensure_ascii=False) + "\n")
out = []
for base, name, change in VARIANTS:
    d = copy.deepcopy(bases[base])
    patch = change(d)
    for key, value in patch.items():
        if key == "model":
            d["model"].update(value)
        else:
            d[key] = value
    tok = Tokenizer.from_str(json.dumps(d))
    tokens = [a["content"] for a in d["added_tokens"]]
    # Releases of the reference disagree about the text of these, so they are not decoded.
    normalized = {a["id"] for a in d["added_tokens"] if a["normalized"]}
    cases = []
    while len(cases) < 50:
        try:
            cases.append(case(tok, tokens, normalized))
        except BaseException as e:  # the reference panics on some overlaps of added tokens
            print(name, e, file=sys.stderr)
    out.append({"base": base, "name": name, "patch": patch, "cases": cases})
lines = ",\n".join(json.dumps(v, ensure_ascii=True) for v in out)
(HERE / "variants.json").write_text("[\n" + lines + "\n]\n")
