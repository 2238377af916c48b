"""Writes tiny_bytefallback.json, tiny_unigram.json and variants.json: small tokenizers with every feature, and what the reference makes of
random text and ids with them.

    python3 -m venv venv && venv/bin/pip install tokenizers==0.23.3
    venv/bin/python make_variants.py

With a number of cases and a file it writes so many of each variant there instead, for go test -run TestVariants
-variants FILE.

A variant is a base tokenizer with some keys replaced (those of "model" one by one). Ids of cases are what the reference
gives, "sp" those with special tokens, "d" random ids and "dec"/"decs" their text without and with skipping specials.
"""

import copy
import json
import pathlib
import random
import sys

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

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
    vocab = d["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max([*ids, *(a["id"] for a in d["added_tokens"])]) + 1


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

# What came later has fewer cases in the repository.
LATER = len(VARIANTS)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTION + "?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTION + "?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])
TEKKEN = GPT4O.replace(CONTRACTION + "?", "").replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]
DEEPSEEK1 = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+"]
HAN = r"[\p{Han}]+|" + QWEN2.replace(r"\p{L}+", r"[\p{L}&&[^\p{Han}]]+")
BEHAVIORS = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]


def sequence(*parts, **rest):
    out = [p if isinstance(p, dict) else {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in parts]
    if not rest.get("bare"):
        out.append({"type": "ByteLevel", "add_prefix_space": rest.get("prefix", False), "trim_offsets": False, "use_regex": rest.get("regex", False)})
    return lambda d: {"pre_tokenizer": {"type": "Sequence", "pretokenizers": out}}


def string(s, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"String": s}, "behavior": behavior, "invert": invert}


def regex(s, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": s}, "behavior": behavior, "invert": invert}


def normal(*steps):
    return lambda d: {"normalizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "normalizers": list(steps)}}


def replaced(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def decoder(*steps):
    return lambda d: {"decoder": steps[0] if len(steps) == 1 else {"type": "Sequence", "decoders": list(steps)}}


def meta(scheme="always", split=True):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def stripped(start, stop, content=" "):
    return {"type": "Strip", "content": content, "start": start, "stop": stop}


def both(*changes):
    return lambda d: {k: v for c in changes for k, v in c(d).items()}


def digits(single):
    return {"type": "Digits", "individual_digits": single}


def roberta(kind):
    return lambda d: {"post_processor": {"type": kind, "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": True, "add_prefix_space": False}}


def dropping(d):
    """A vocabulary without some characters and without an unknown token: their neighbors meet."""
    return {"model": {"unk_token": None, "byte_fallback": False, "fuse_unk": False}, "normalizer": None}


def duplicates(d):
    vocab = [list(p) for p in d["model"]["vocab"]]
    return {"model": {"vocab": vocab + [[t, s - 1] for t, s in vocab[300:330]]}}


def unigram():
    """A small Unigram tokenizer with byte tokens, trained on the sentences above."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tok.train_from_iterator(SENTENCES[:5] * 3, trainers.UnigramTrainer(vocab_size=460, special_tokens=special, unk_token="<unk>", show_progress=False))
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    d = json.loads(tok.to_str())
    d["added_tokens"] = [a for a in d["added_tokens"] if a["id"] < 3]
    d["model"]["byte_fallback"] = True
    return d


VARIANTS += [
    ("tiny", "llama3", split(LLAMA3)),
    ("tiny", "gpt4o", split(GPT4O)),
    ("tiny", "tekken", split(TEKKEN)),
    ("tiny", "qwen3.5", split(QWEN35)),
    ("tiny", "cl100k", sequence(CL100K)),
    ("tiny", "deepseek3", sequence(*DEEPSEEK3)),
    ("tiny", "deepseek1", sequence(*DEEPSEEK1)),
    ("tiny", "han", sequence(HAN)),
    ("tiny", "digits", sequence(digits(True), regex=True)),
    ("tiny", "runs of digits", sequence(digits(False), regex=True)),
    ("tiny", "prefix space after a split", sequence(digits(True), prefix=True)),
    ("tiny", "white space removed", sequence({"type": "WhitespaceSplit"})),
    ("tiny", "word", sequence(regex(r"\w+|[^\w\s]+"))),
    ("tiny", "bounds", sequence(regex(r"\b|(?<=\d)(?=\D)"))),
    ("tiny", "lines", sequence(regex(r"^.*$\n?|\A\s|\s\z"))),
    ("tiny", "lazy", sequence(regex(r"(?:\p{L}{2,4}?|[a-e]{,2}x)|(?>\d+|\s+?)"))),
    ("tiny", "nested", sequence(regex(r"(?:(?:a|e|the)+(?<!e)|[^\x00-\x7F]\p{Mn}*)+|[[;-@][!-/]&&[^.,]]"))),
    ("tiny", "any case", sequence(regex(r"(?i)the|[k-s]x?|\u212a"))),
    *[("tiny", f"string {b} {i}", sequence(string("e", b, i))) for b in BEHAVIORS for i in (False, True)],
    *[("tiny", f"regex {b} {i}", sequence(regex(r"\s|[,.]+|er?", b, i))) for b in BEHAVIORS for i in (False, True)],
    ("tiny", "empty matches", sequence(regex(r"x*"))),
    ("tiny", "NFD", normal({"type": "NFD"})),
    ("tiny", "NFKC", normal({"type": "NFKC"})),
    ("tiny", "NFKD", normal({"type": "NFKD"})),
    ("tiny", "lowercase", normal({"type": "Lowercase"})),
    ("tiny", "strip", normal({"type": "Strip", "strip_left": True, "strip_right": False}, {"type": "NFC"})),
    ("tiny", "strip right", normal({"type": "Strip", "strip_left": False, "strip_right": True}, {"type": "NFKC"}, {"type": "Lowercase"})),
    ("tiny", "regex replaced", normal(replaced({"Regex": r" {2,}|\p{Mn}"}, "_"))),
    ("tiny", "ends replaced", normal(replaced({"Regex": r"^\s+|\s+$"}, ""), replaced({"Regex": "''|``"}, '"'))),
    ("tiny", "roberta", roberta("RobertaProcessing")),
    ("tiny", "bert", roberta("BertProcessing")),
    ("bytefallback", "dropping", dropping),
    ("bytefallback", "dropping, some bytes", both(dropping, lambda d: {"model": dict(missing_bytes(d)["model"], unk_token=None, byte_fallback=True)})),
    *[("bytefallback", f"decoder metaspace {s}", decoder(meta(s))) for s in ("first", "always", "never")],
    ("bytefallback", "decoder metaspace and bytes", decoder(meta(), {"type": "ByteFallback"}, {"type": "Fuse"}, stripped(1, 0, "t"))),
    ("bytefallback", "decoder of tokens", decoder(replaced({"Regex": r"[aeo]+"}, "*"), replaced({"String": "▁"}, " "), stripped(1, 1, "*"), {"type": "ByteFallback"}, {"type": "Fuse"})),
    ("bytefallback", "split, metaspace", both(sequence(string("e", "MergedWithPrevious"), meta("first"), bare=True), normal({"type": "NFC"}))),
    ("bytefallback", "words, metaspace", both(sequence({"type": "WhitespaceSplit"}, meta(), bare=True), normal({"type": "NFC"}))),
    ("bytefallback", "words", both(sequence(digits(True), {"type": "WhitespaceSplit"}, bare=True), normal({"type": "NFKC"}))),
    ("unigram", "plain", lambda d: {}),
    ("unigram", "no bytes", model(byte_fallback=False)),
    ("unigram", "words", both(sequence({"type": "WhitespaceSplit"}, meta(), bare=True), normal({"type": "NFKC"}))),
    ("unigram", "whole", lambda d: {"pre_tokenizer": None}),
    ("unigram", "odd added", odd_added),
    ("unigram", "duplicates", duplicates),
    ("unigram", "missing bytes", lambda d: {"model": {"vocab": [["<no" + t[1:] if t in ("<0xE4>", "<0xC3>") else t, s] for t, s in d["model"]["vocab"]]}}),
]

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


many, path = (int(sys.argv[1]), pathlib.Path(sys.argv[2])) if len(sys.argv) > 2 else (0, HERE / "variants.json")
bases = {"tiny": json.loads((HERE / "tiny_tokenizer.json").read_text())}
for name, make in (("bytefallback", bytefallback), ("unigram", unigram)):
    file = HERE / f"tiny_{name}.json"
    if not file.exists() or name == "bytefallback" and not many:
        file.write_text(json.dumps(make(), ensure_ascii=False) + "\n")
    bases[name] = json.loads(file.read_text())
out = []
for number, (base, name, change) in enumerate(VARIANTS):
    if number == LATER:
        random.seed(21)
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
    normalized = {tok.token_to_id(a["content"]) for a in d["added_tokens"] if a["normalized"]}
    cases = []
    while len(cases) < (many or (50 if number < LATER else 15)):
        try:
            cases.append(case(tok, tokens, normalized))
        except BaseException as e:  # the reference panics on some overlaps of added tokens
            print(name, e, file=sys.stderr)
    out.append({"base": base, "name": name, "patch": patch, "cases": cases})
lines = ",\n".join(json.dumps(v, ensure_ascii=True) for v in out)
path.write_text("[\n" + lines + "\n]\n")
