"""The vocabulary of the built-in model: a byte-level BPE tokenizer built from a fixed list of words.

Every byte is a token of its own, so any prompt can be encoded. Digits never merge. The words that the tasks use, and
every single letter behind a space, are one token each.
"""

import json

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
SPECIALS = [END, USER, ASSISTANT]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = (
    "Ann Ben Cal Dan Eve Fay Gus Hal Ida Jon Kim Lee Mia Ned Ola Pam "
    "Quinn Ray Sam Tom Uma Vic Will Xena Yan Zoe Abe Bea Cora Dora Ella Finn"
).split()
OBJECTS = (
    "ball book cup key lamp map box coin ring bell drum flute "
    "kite doll hat coat shoe pen rope clock spoon plate brush candle"
).split()
COLORS = "red blue green white black brown pink gray gold silver purple orange".split()
PLACES = (
    "kitchen garden attic cellar garage hall office study "
    "barn shed tower yard closet pantry studio library"
).split()
STARTS = ["sort", "reverse", "recall", "The"]
GLUE = "gave the to put in has and is Who Where What color".split()

# The chat template keeps user and assistant turns and drops the rest: the model knows no system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def byte_symbols():
    """Returns the 256 printable characters that stand for the 256 bytes in byte-level BPE, indexed by byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {b: chr(b) for b in kept}
    moved = (b for b in range(256) if b not in symbols)
    symbols.update({b: chr(256 + i) for i, b in enumerate(moved)})
    return [symbols[b] for b in range(256)]


SYMBOLS = byte_symbols()


def written(text):
    """Spells text in the characters that stand for its UTF-8 bytes."""
    return "".join(SYMBOLS[b] for b in text.encode())


def learn_merges(words, before=()):
    """Merges the most frequent neighbors (ties: the first in code point order) until each word is one token.

    before has merges that are made first, and that are not among those returned.
    """
    split = [list(written(w)) for w in words]
    for pair in before:
        for parts in split:
            merge(parts, pair)
    merges = []
    while True:
        counts = {}
        for parts in split:
            for pair in zip(parts, parts[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            return merges
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for parts in split:
            merge(parts, best)


def merge(parts, pair):
    """Joins the neighbors that are a pair, in place."""
    i = 0
    while i < len(parts) - 1:
        if (parts[i], parts[i + 1]) == pair:
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        i += 1


class Vocabulary:
    """Token ids by text, and the files that describe the tokenizer to others."""

    template = CHAT_TEMPLATE
    answer = 32  # tokens of a completion, where a request has no limit

    def __init__(self, words=(), pieces=()):
        """words become tokens, and pieces added tokens, behind those of the five tasks, which keep their ids."""
        known = [" " + c for c in LETTERS] + STARTS + [" " + w for w in GLUE] + [" ="]
        known += NAMES + [" " + w for w in NAMES + OBJECTS + COLORS + PLACES]
        self.merges = learn_merges(known)
        self.merges += learn_merges(words, self.merges)
        self.added = SPECIALS + list(pieces)
        tokens = SPECIALS + SYMBOLS + [a + b for a, b in self.merges] + list(pieces)
        self.ids = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
        back = {s: b for b, s in enumerate(SYMBOLS)}
        self.bytes = [
            t.encode() if t in self.added else bytes(back[c] for c in t)
            for t in self.ids
        ]

    def __len__(self):
        return len(self.ids)

    def id(self, text):
        """The id of text, which must be a single token."""
        return self.ids[text if text in self.added else written(text)]

    def encode(self, text):
        """The ids of a text of the tasks, by longest match: there, though not in any text, that is what BPE gives."""
        symbols, ids = written(text), []
        while symbols:
            end = next(e for e in range(len(symbols), 0, -1) if symbols[:e] in self.ids)
            ids.append(self.ids[symbols[:end]])
            symbols = symbols[end:]
        return ids

    def text(self, ids):
        return b"".join(self.bytes[i] for i in ids).decode()

    def tokenizer_json(self):
        added = [
            {
                "id": self.ids[t],
                "content": t,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": t in SPECIALS,
            }
            for t in self.added
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": self.ids,
                "merges": [list(m) for m in self.merges],
            },
        }

    def tokenizer_config(self, context):
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": END,
            "pad_token": END,
            "chat_template": self.template,
        }

    def write(self, folder, context):
        """Writes tokenizer.json and tokenizer_config.json (context: tokens) into folder, a pathlib.Path."""
        for name, content in (
            ("tokenizer.json", self.tokenizer_json()),
            ("tokenizer_config.json", self.tokenizer_config(context)),
        ):
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
