"""The five tasks: prompts and answers as token tensors, drawn on any torch device, and the test split.

A generator returns (prompt, answer): int64 tensors [n, width] of token ids, with HOLE wherever a sample has nothing in
a column. Holes are squeezed out later, so that a batch of ragged texts needs no loop.
"""

import math
import re

import torch

from vocabulary import COLORS, END, LETTERS, NAMES, OBJECTS, PLACES, Vocabulary

HOLE = -1
TASKS = ["addition", "sorting", "reversing", "recall", "sentences"]
SYMBOLS_MIN, SYMBOLS_MAX = 4, 10  # in sorting and reversing
PAIRS_MIN, PAIRS_MAX = 4, 8  # in recall
TEST_SEED = 20_001  # of the test prompts that scores are measured on

# One prompt in TEST_SHARE is a test prompt. The hash is a polynomial in the prompt's UTF-8 bytes (each plus one),
# modulo 2^64, and then mixed: a polynomial because that can be summed from whole tokens, in parallel.
# models/tiny/split.go holds the same function.
TEST_SHARE = 16
HASH_BASE = 0x100000001B3
HASH_MIX = 0xFF51AFD7ED558CCD
WORD = (1 << 64) - 1


def held_out(prompt):
    """Reports whether a prompt belongs to the test split: such a prompt is never trained on, in any form."""
    h = 0
    for b in prompt.encode():
        h = (h * HASH_BASE + b + 1) & WORD
    h ^= h >> 33
    h = h * HASH_MIX & WORD
    h ^= h >> 33
    return h % TEST_SHARE == 0


def answer_to(prompt):
    """The answer to a prompt of any task, worked out from its text alone."""
    if m := re.fullmatch(r"(\d+)\+(\d+)=", prompt):
        return str(int(m[1]) + int(m[2]))
    if m := re.fullmatch(r"sort: ([a-z ]+) =", prompt):
        return " ".join(sorted(m[1].split(" ")))
    if m := re.fullmatch(r"reverse: ([a-z ]+) =", prompt):
        return " ".join(reversed(m[1].split(" ")))
    if m := re.fullmatch(r"recall: (.+); ([a-z])=", prompt):
        return dict(pair.split("=") for pair in m[1].split(" "))[m[2]]
    if m := re.fullmatch(r"\w+ gave the (\w+ \w+) to (\w+)\. Who has the \w+\?", prompt):
        return f"{m[2]} has the {m[1]}."
    if m := re.fullmatch(r"\w+ put the (\w+ \w+) in the (\w+)\. Where is the \w+\?", prompt):
        return f"The {m[1]} is in the {m[2]}."
    if m := re.fullmatch(r"\w+ put the (\w+) (\w+) in the \w+\. What color is the \w+\?", prompt):
        return f"The {m[2]} is {m[1]}."
    if m := re.fullmatch(r"(\w+) has the (\w+) and (\w+) has the (\w+)\. Who has the (\w+)\?", prompt):
        return f"{m[1] if m[5] == m[2] else m[3]} has the {m[5]}."
    if m := re.fullmatch(r"(\w+) is in the (\w+) and (\w+) is in the (\w+)\. Where is (\w+)\?", prompt):
        return f"{m[5]} is in the {m[2] if m[5] == m[1] else m[4]}."
    raise ValueError(f"no task has the prompt {prompt!r}")


def possible_prompts():
    """Counts the prompts that each task can ask."""
    letters = len(LETTERS)
    symbols = sum(letters**n for n in range(SYMBOLS_MIN, SYMBOLS_MAX + 1))
    names, objects, colors, places = (len(x) for x in (NAMES, OBJECTS, COLORS, PLACES))
    return {
        "addition": 1000 * 1000,
        "sorting": symbols,
        "reversing": symbols,
        "recall": sum(math.perm(letters, n) * 100**n * n for n in range(PAIRS_MIN, PAIRS_MAX + 1)),
        "sentences": math.perm(names, 2) * colors * objects
        + 2 * names * colors * objects * places
        + 2 * math.perm(names, 2) * math.perm(objects, 2)
        + 2 * math.perm(names, 2) * math.perm(places, 2),
    }


class Generator:
    """Draws samples of every task on one torch device, with a random stream of its own."""

    def __init__(self, vocabulary: Vocabulary, device, seed):
        self.v = vocabulary
        self.device = device
        self.rng = torch.Generator(device).manual_seed(seed)
        ids = lambda texts: torch.tensor([self.v.id(t) for t in texts], device=device)
        self.digits = ids("0123456789")
        self.letters, self.spaced = ids(LETTERS), ids(" " + c for c in LETTERS)
        self.names, self.spaced_names = ids(NAMES), ids(" " + w for w in NAMES)
        self.objects = ids(" " + w for w in OBJECTS)
        self.colors = ids(" " + w for w in COLORS)
        self.places = ids(" " + w for w in PLACES)
        self.closers = ids(["=", " ="])

        # Per token, for the split's hash: its length in bytes, and the polynomial over its bytes; 0 for a hole, which
        # is looked up at the last place, as index -1.
        lengths, sums, powers = [], [], [1]
        for word in self.v.bytes:
            h = 0
            for b in word:
                h = (h * HASH_BASE + b + 1) & WORD
            lengths.append(len(word))
            sums.append(signed(h))
        while len(powers) < 512:
            powers.append(powers[-1] * HASH_BASE & WORD)
        self.token_bytes = torch.tensor(lengths + [0], device=device)
        self.token_sums = torch.tensor(sums + [0], device=device)
        self.powers = torch.tensor([signed(p) for p in powers], device=device)

    def held_out(self, prompt):
        """held_out for token ids [n, width]: bool [n]."""
        size = self.token_bytes[prompt]
        after = size.flip(1).cumsum(1).flip(1) - size
        h = (self.token_sums[prompt] * self.powers[after]).sum(1)
        h = h ^ (h >> 33 & 0x7FFFFFFF)
        h = h * signed(HASH_MIX)
        h = h ^ (h >> 33 & 0x7FFFFFFF)
        return h % TEST_SHARE == 0

    def draw(self, task, n):
        return getattr(self, task)(n)

    def below(self, n, *shape):
        return torch.randint(n, shape, generator=self.rng, device=self.device)

    def uniform(self, *shape):
        return torch.rand(shape, generator=self.rng, device=self.device)

    def distinct(self, n, total, count):
        """count different numbers below total, for each of n rows."""
        return self.uniform(n, total).argsort(1)[:, :count]

    def columns(self, n, *parts):
        """Joins texts (single tokens) and tensors [n] or [n, k] of ids into one tensor [n, width]."""
        built = []
        for part in parts:
            if isinstance(part, str):
                part = torch.full((n, 1), self.v.id(part), device=self.device)
            built.append(part if part.dim() == 2 else part[:, None])
        return torch.cat(built, 1)

    def number(self, value, width):
        """The digits of value [n], most significant first, without leading zeros."""
        ten = 10 ** torch.arange(width - 1, -1, -1, device=self.device)
        ids = self.digits[value[:, None] // ten % 10]
        return ids.masked_fill((value[:, None] < ten) & (ten > 1), HOLE)

    def addition(self, n):
        # Half of the operands are uniform, half uniform in their number of digits, or short ones would be rare.
        limit = 10 ** (1 + self.below(3, n, 2))
        limit = torch.where(self.uniform(n, 2) < 0.5, 1000, limit)
        operands = (self.uniform(n, 2) * limit).long()
        a, b = operands.unbind(1)
        prompt = self.columns(n, self.number(a, 3), "+", self.number(b, 3), "=")
        return prompt, self.number(a + b, 4)

    def symbols(self, n):
        """Letters [n, SYMBOLS_MAX] as numbers, and how many of them count [n, 1].

        A third of the samples draw from few letters, so that repeats are common.
        """
        few = torch.where(self.uniform(n, 1) < 0.33, 2 + self.below(7, n, 1), len(LETTERS))
        alphabet = self.uniform(n, len(LETTERS)).argsort(1)
        drawn = alphabet.gather(1, (self.uniform(n, SYMBOLS_MAX) * few).long())
        return drawn, SYMBOLS_MIN + self.below(SYMBOLS_MAX - SYMBOLS_MIN + 1, n, 1)

    def listed(self, letters, used):
        """Letters as ids, the first without a space before it, HOLE where not used."""
        ids = self.spaced[letters]
        ids[:, 0] = self.letters[letters[:, 0]]
        return ids.masked_fill(~used, HOLE)

    def sorting(self, n):
        drawn, count = self.symbols(n)
        used = torch.arange(SYMBOLS_MAX, device=self.device) < count
        prompt = self.columns(n, "sort", ":", self.spaced[drawn].masked_fill(~used, HOLE), " =")
        in_order = drawn.masked_fill(~used, len(LETTERS)).sort(1).values.clamp(max=len(LETTERS) - 1)
        return prompt, self.listed(in_order, used)

    def reversing(self, n):
        drawn, count = self.symbols(n)
        place = torch.arange(SYMBOLS_MAX, device=self.device)
        used = place < count
        prompt = self.columns(n, "reverse", ":", self.spaced[drawn].masked_fill(~used, HOLE), " =")
        return prompt, self.listed(drawn.gather(1, (count - 1 - place).clamp(min=0)), used)

    def recall(self, n):
        keys = self.distinct(n, len(LETTERS), PAIRS_MAX)
        values = self.digits[self.below(10, n, PAIRS_MAX, 2)]
        count = PAIRS_MIN + self.below(PAIRS_MAX - PAIRS_MIN + 1, n)
        equals = torch.full((n, PAIRS_MAX, 1), self.v.id("="), device=self.device)
        pairs = torch.cat([self.spaced[keys][:, :, None], equals, values], 2)
        used = torch.arange(PAIRS_MAX, device=self.device) < count[:, None]
        pairs = pairs.masked_fill(~used[:, :, None], HOLE).flatten(1)
        asked = (self.uniform(n) * count).long()
        row = torch.arange(n, device=self.device)
        prompt = self.columns(n, "recall", ":", pairs, ";", self.spaced[keys[row, asked]], "=")
        return prompt, values[row, asked]

    def sentences(self, n):
        kinds = [self.gave, self.put_where, self.put_color, self.owners, self.rooms]
        share = [len(range(i, n, len(kinds))) for i in range(len(kinds))]
        drawn = [kind(k) for kind, k in zip(kinds, share)]
        order = self.uniform(n).argsort()
        return [torch.cat(padded(side))[order] for side in zip(*drawn)]

    def people(self, n):
        return self.distinct(n, len(NAMES), 2).unbind(1)

    def thing(self, n):
        return self.colors[self.below(len(COLORS), n)], self.objects[self.below(len(OBJECTS), n)]

    def gave(self, n):
        a, b = self.people(n)
        color, thing = self.thing(n)
        asked = [" Who", " has", " the", thing, "?"]
        return (
            self.columns(n, self.names[a], " gave", " the", color, thing, " to", self.spaced_names[b], ".", *asked),
            self.columns(n, self.names[b], " has", " the", color, thing, "."),
        )

    def put(self, n):
        a, place = self.below(len(NAMES), n), self.places[self.below(len(PLACES), n)]
        color, thing = self.thing(n)
        told = self.columns(n, self.names[a], " put", " the", color, thing, " in", " the", place, ".")
        return told, color, thing, place

    def put_where(self, n):
        told, color, thing, place = self.put(n)
        return (
            self.columns(n, told, " Where", " is", " the", thing, "?"),
            self.columns(n, "The", color, thing, " is", " in", " the", place, "."),
        )

    def put_color(self, n):
        told, color, thing, _ = self.put(n)
        return (
            self.columns(n, told, " What", " color", " is", " the", thing, "?"),
            self.columns(n, "The", thing, " is", color, "."),
        )

    def owners(self, n):
        people, things = self.distinct(n, len(NAMES), 2), self.objects[self.distinct(n, len(OBJECTS), 2)]
        one, two = [" has", " the", things[:, 0]], [" has", " the", things[:, 1]]
        row, asked = torch.arange(n, device=self.device), self.below(2, n)
        first, second, who = self.names[people[:, 0]], self.spaced_names[people[:, 1]], self.names[people[row, asked]]
        thing = things[row, asked]
        return (
            self.columns(n, first, *one, " and", second, *two, ".", " Who", " has", " the", thing, "?"),
            self.columns(n, who, " has", " the", thing, "."),
        )

    def rooms(self, n):
        people, places = self.distinct(n, len(NAMES), 2), self.places[self.distinct(n, len(PLACES), 2)]
        one, two = [" is", " in", " the", places[:, 0]], [" is", " in", " the", places[:, 1]]
        row, asked = torch.arange(n, device=self.device), self.below(2, n)
        first, second, who = self.names[people[:, 0]], self.spaced_names[people[:, 1]], people[row, asked]
        return (
            self.columns(n, first, *one, " and", second, *two, ".", " Where", " is", self.spaced_names[who], "?"),
            self.columns(n, self.names[who], " is", " in", " the", places[row, asked], "."),
        )


def signed(word):
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def padded(tensors):
    """Fills tensors [n_i, width_i] up with holes to one width."""
    width = max(t.shape[1] for t in tensors)
    return [torch.nn.functional.pad(t, (0, width - t.shape[1]), value=HOLE) for t in tensors]


def texts(vocabulary, rows):
    """Token ids [n, width] as text."""
    return [vocabulary.text([i for i in row if i != HOLE]) for row in rows.tolist()]


def unseen(vocabulary, task, count, seed):
    """Draws count different test prompts of a task, as pairs (prompt, answer). The same on every machine."""
    generator = Generator(vocabulary, "cpu", seed)
    found = {}
    while len(found) < count:
        prompt, answer = generator.draw(task, 4096)
        kept = generator.held_out(prompt)
        for p, a in zip(texts(vocabulary, prompt[kept]), texts(vocabulary, answer[kept])):
            if not held_out(p) or answer_to(p) != a:
                raise AssertionError(f"generator and text disagree on {p!r} -> {a!r}")
            found[p] = a
    return list(found.items())[:count]


class Packer:
    """Packs samples into training rows.

    A row holds conversations one after the other: a bare prompt with its answer, as a completion sees it, or a chat of
    one or more turns. Attention stays inside a conversation.
    """

    TOKENS_PER_SLOT = 16  # fewer than a sample has on average: what does not fit into its row is cut off
    LONG = 0.25  # share of rows that are one long chat
    CHAT, GOES_ON = 0.3, 0.5  # in the other rows, shares of samples that are in a chat, and that follow on one
    NO_CLOSER = 0.5  # share of prompts in a chat without their closing "="

    def __init__(self, generator: Generator, length, mix):
        self.g, self.length, self.slots = generator, length, length // self.TOKENS_PER_SLOT
        total = sum(mix.values())
        self.share = {task: mix[task] / total for task in TASKS}

    def rows(self, n):
        """Draws n rows: ids, targets (HOLE where nothing is learned) and conversation numbers, each [n, length]."""
        g, slots = self.g, n * self.slots
        left, drawn = slots, []
        for i, task in enumerate(TASKS):
            count = left if i == len(TASKS) - 1 else min(left, round(self.share[task] * slots))
            left -= count
            prompt, answer = g.draw(task, count + count // 8 + 64)
            order = g.held_out(prompt).int().argsort(stable=True)[:count]
            # Were there ever more test prompts than the surplus, the last rows would still hold some: they are emptied.
            kept = ~g.held_out(prompt[order])[:, None]
            drawn.append([part[order].where(kept, HOLE) for part in (prompt, answer)])
        prompt, answer = (torch.cat(padded(side)) for side in zip(*drawn))
        shuffled = g.uniform(slots).argsort()
        prompt, answer = prompt[shuffled], answer[shuffled]

        long = g.uniform(n, 1) < self.LONG
        chat = long | (g.uniform(n, self.slots) < self.CHAT)
        after_chat = torch.nn.functional.pad(chat, (1, 0))[:, :-1]
        goes_on = chat & after_chat & (long | (g.uniform(n, self.slots) < self.GOES_ON))
        conversation = (~goes_on).cumsum(1)
        chat = chat.flatten()[:, None]
        last = (prompt != HOLE).flip(1).cumsum(1).flip(1) == 1
        closer = last & torch.isin(prompt, g.closers)
        prompt = prompt.masked_fill(closer & chat & (g.uniform(slots, 1) < self.NO_CLOSER), HOLE)

        mark = lambda text: torch.full((slots, 1), g.v.id(text), device=g.device)
        user, assistant = (mark(t).where(chat, HOLE) for t in ("<|user|>", "<|assistant|>"))
        ids = torch.cat([user, prompt, assistant, answer, mark(END)], 1)
        learned = torch.zeros_like(ids, dtype=torch.bool)
        learned[:, 2 + prompt.shape[1] :] = True

        spread = conversation[:, :, None].expand(-1, -1, ids.shape[1]).flatten(1)
        ids, learned = ids.view(n, -1), learned.view(n, -1)
        order = (ids == HOLE).int().argsort(dim=1, stable=True)[:, : self.length + 1]
        ids, learned, spread = (t.gather(1, order) for t in (ids, learned, spread))
        target = ids.where(learned, HOLE)[:, 1:]
        filled = ids[:, :-1] != HOLE
        return ids[:, :-1].clamp(min=0), target, spread[:, :-1].where(filled, 0)
