"""Conversations with tools, and prompts whose answers are JSON: their texts, drawn at random, and training rows of them.

A conversation is a list of turns [prompt, answer], the texts on both sides of <|assistant|>. Only answers are learned.
"""

import json
import multiprocessing
import random

import torch
from tokenizers import Tokenizer

from tasks import HOLE, TASKS, Generator, held_out, texts
from vocabulary import ASSISTANT, COLORS, END, NAMES, OBJECTS, PLACES, USER, Vocabulary

TOOL, CALL, CALLED, RESPONSE = "<tool>", "<tool_call>", "</tool_call>", "<tool_response>"
# Calls begin with pieces that end where a server that forces a call ends its prompt: at the name and at the arguments.
PIECES = [TOOL, CALL, CALLED, RESPONSE, '\n{"name": "', '", "arguments":']
# What is in arguments are merges, because a server matches no added token in what clients send, such as calls before.
MARKS = [' {"', '{"', '":', ' "', '",', '"}', '"}}', ' {}}', '}}']

CITIES = "Paris Rome Berlin Tokyo London Madrid Oslo Vienna Lisbon Prague Dublin Cairo".split()
DAYS = "today tomorrow Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
WEATHER = "sunny cloudy rainy windy foggy stormy".split()

# What tools do: the names that a tool may have, and for each argument the names and the type that it may have.
TOOLS = {
    "add": (["add", "sum", "plus"], [(["a", "x", "first"], "integer"), (["b", "y", "second"], "integer")]),
    "find": (["find", "search", "lookup"], [(["object", "thing", "item"], "string"), (["color"], COLORS)]),
    "locate": (["locate", "whereabouts"], [(["name", "person"], "string")]),
    "paint": (["paint", "dye"], [(["object", "thing", "item"], "string"), (["color"], COLORS)]),
    "give": (["give", "send"], [(["object", "thing", "item"], "string"), (["name", "person", "receiver"], "string")]),
    "weather": (["weather", "get_weather", "forecast"], [(["city", "town"], "string"), (["day"], DAYS)]),
    "timer": (["timer", "set_timer", "alarm"], [(["minutes", "duration"], "integer")]),
    "next": (["next_question"], []),
}
# Fields of JSON answers: what each is about in the sentence "NAME put the COLOR OBJECT in the PLACE."
FIELDS = {"name": 0, "person": 0, "color": 1, "object": 2, "thing": 2, "item": 2, "place": 3, "room": 3}
VERBS = "Find Paint Give What How Set timer for plus hours minutes weather on Answer next question done".split()


def words():
    """What the vocabulary has as tokens, with and without a space before it."""
    plain = [n for names, arguments in TOOLS.values() for n in sum((a for a, _ in arguments), list(names))]
    plain = [part for n in plain for part in n.split("_") if len(part) > 1] + list(FIELDS) + CITIES + DAYS + WEATHER
    plain += OBJECTS + COLORS + PLACES
    both = list(dict.fromkeys(plain + VERBS + ["JSON", "with", "It", "will", "be", "room", "sum"]))
    return both + [" " + w for w in both] + MARKS


TEMPLATE = (
    "{% for tool in tools or [] %}" + TOOL + "{{ tool.function.name }}"
    "{% for key in (tool.function.parameters or {}).properties or {} %} {{ key }}{% endfor %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}" + USER + "{{ message.content | trim }}"
    "{% elif message.role == 'tool' %}" + RESPONSE + "{{ message.content | trim }}"
    "{% elif message.role == 'assistant' %}" + ASSISTANT + "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{% if not loop.first or message.content %}{{ '\\n' }}{% endif %}"
    "{{ '" + CALL + '\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n" + CALLED + "' }}"
    "{% endfor %}" + END + "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


class CallVocabulary(Vocabulary):
    """The vocabulary of the five tasks, extended for calls and JSON. encode is what a tokenizer gives for a text."""

    template = TEMPLATE
    answer = 64  # two calls are longer than the 32 tokens that the five tasks have

    def __init__(self):
        super().__init__(words(), PIECES)
        self.cut = None

    def encode(self, text):
        if self.cut is None:
            self.cut = Tokenizer.from_str(json.dumps(self.tokenizer_json()))
        return self.cut.encode(text, add_special_tokens=False).ids


def call_text(name, arguments):
    return f'{CALL}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n{CALLED}'


class Draw:
    """Draws conversations. test: with questions of the test split alone, else with none of them."""

    def __init__(self, seed, test=False):
        self.r, self.test = random.Random(seed), test
        plain = Generator(Vocabulary(), "cpu", seed)
        self.plain = []
        for task in TASKS:
            prompt, answer = plain.draw(task, 16000 if test else 2000)
            kept = plain.held_out(prompt) == test
            self.plain += zip(texts(plain.v, prompt[kept]), texts(plain.v, answer[kept]))

    def pick(self, options):
        return self.r.choice(options)

    def tool(self, kind):
        """A tool of a kind under names drawn for it: (name, names of its arguments)."""
        names, arguments = TOOLS[kind]
        return self.pick(names), [self.pick(a) for a, _ in arguments]

    def asked(self, kind):
        """A question for a tool: (question, values of the arguments, the tool's result, the answer then)."""
        while True:
            drawn = self.question(kind)
            # "next" has one question only, which no split can divide: its result is in the split instead.
            if kind == "next" or held_out(drawn[0]) == self.test:
                return drawn

    def question(self, kind):
        r, pick = self.r, self.pick
        name, thing, color, place = pick(NAMES), pick(OBJECTS), pick(COLORS), pick(PLACES)
        if kind == "add":
            a, b = (r.randrange(10 ** r.randint(1, 3)) for _ in range(2))
            return f"What is {a} plus {b}?", [a, b], str(a + b), f"{a} plus {b} is {a + b}."
        if kind == "find":
            return f"Where is the {color} {thing}?", [thing, color], place, f"The {color} {thing} is in the {place}."
        if kind == "locate":
            form = pick([f"Where is {name}?", f"Find {name}.", f"What room is {name} in?"])
            return form, [name], place, f"{name} is in the {place}."
        if kind == "paint":
            return f"Paint the {thing} {color}.", [thing, color], "done", f"The {thing} is {color}."
        if kind == "give":
            return f"Give the {thing} to {name}.", [thing, name], "done", f"{name} has the {thing}."
        if kind == "weather":
            city, day, sky = pick(CITIES), pick(DAYS), pick(WEATHER)
            on = day if day in DAYS[:2] else "on " + day
            form = pick([f"What is the weather in {city} {on}?", f"How will the weather be in {city} {on}?"])
            return form, [city, day], sky, f"It will be {sky} in {city}."
        if kind == "timer":
            hours, minutes = r.randint(1, 12), r.randrange(60)
            total = 60 * hours + minutes
            return f"Set the timer to {hours} hours and {minutes} minutes.", [total], "done", f"{total} minutes."
        prompt, answer = pick(self.plain)
        return "Answer the next question.", [], prompt, answer

    def tools(self, kinds):
        """1 to 3 tools, with those of kinds among them: {kind: tool} in the order in which they are shown."""
        rest = [k for k in TOOLS if k not in kinds]
        shown = list(kinds) + self.r.sample(rest, self.r.randint(0, 3 - len(kinds)) if kinds else self.r.randint(1, 3))
        self.r.shuffle(shown)
        return {kind: self.tool(kind) for kind in shown}

    def called(self, tools, kinds):
        """The two turns of a question for tools of some kinds."""
        drawn = [self.asked(kind) for kind in kinds]
        calls = [call_text(tools[k][0], dict(zip(tools[k][1], d[1]))) for k, d in zip(kinds, drawn)]
        return [
            [USER + " ".join(d[0] for d in drawn), "\n".join(calls)],
            ["".join(RESPONSE + d[2] for d in drawn), " ".join(d[3] for d in drawn)],
        ]

    def answered(self):
        prompt, answer = self.pick(self.plain)
        if prompt[-1] == "=" and self.r.random() < 0.5:
            prompt = prompt[:-1].strip()
        return [USER + prompt, answer]

    def conversation(self, what):
        """A conversation: what is "call", "parallel", "plain" (no tool is needed), "schema" (an answer in JSON, to a
        prompt that names its fields) or "forced" (to one that may not).
        """
        if what in ("schema", "forced"):
            return [self.schema(named=what == "schema" or self.r.random() < 0.5)]
        count = {"plain": 0, "call": 1, "parallel": 2}[what]
        kinds = self.r.sample([kind for kind in TOOLS if count < 2 or kind != "next"], count)
        tools = self.tools(kinds)
        turns = self.called(tools, kinds) if kinds else [self.answered()]
        if not self.test and self.r.random() < 0.3:
            turns += self.pick([lambda: self.called(tools, [self.pick(list(tools))]), lambda: [self.answered()]])()
        turns[0][0] = "".join(TOOL + " ".join([name, *keys]) for name, keys in tools.values()) + turns[0][0]
        return turns

    def schema(self, named):
        """A sentence, or a sum, and its facts as JSON. named: the prompt has the names of the fields."""
        while True:
            if self.r.random() < 0.2:
                a, b = (self.r.randrange(1000) for _ in range(2))
                told, facts = f"What is {a} plus {b}?", {"a": a, "b": b, "sum": a + b}
            else:
                values = [self.pick(x) for x in (NAMES, COLORS, OBJECTS, PLACES)]
                told = "{} put the {} {} in the {}.".format(*values)
                names = [self.pick([f for f, of in FIELDS.items() if of == i]) for i in range(4)]
                names = self.r.sample(names, self.r.randint(1, 4))
                facts = {f: values[FIELDS[f]] for f in names}
            if held_out(told) == self.test:
                break
        fields = " with " + " ".join(facts) if named else ""
        return [f"{USER}{told} JSON{fields}", json.dumps(facts)]


MIX = {"call": 6, "parallel": 2, "plain": 2, "schema": 1, "forced": 2}


def encoded(vocabulary, turns, learn=lambda turn: True):
    """Ids of a conversation, and which of them are learned."""
    ids, learned = [], []
    for i, (prompt, answer) in enumerate(turns):
        told, said = vocabulary.encode(prompt + ASSISTANT), vocabulary.encode(answer + END)
        ids += told + said
        learned += [False] * len(told) + [learn(i)] * len(said)
    return ids, learned


def packed(job):
    """Rows of conversations: ids, targets and conversation numbers, int16 [rows, 3, length]."""
    rows, length, seed = job
    torch.set_num_threads(1)
    draw, vocabulary = Draw(seed), CallVocabulary()
    built = []
    carried = None
    while len(built) < rows:
        ids, target, numbers, number = [], [], [], 0
        while True:
            one, learned = carried or encoded(vocabulary, draw.conversation(*draw.r.choices(list(MIX), MIX.values())))
            if len(one) > length:
                raise ValueError(f"a conversation has {len(one)} tokens, more than a row's {length}")
            if len(ids) + len(one) > length:
                carried = one, learned
                break
            carried, number = None, number + 1
            ids += one
            target += [i if l else HOLE for i, l in zip(one[1:], learned[1:])] + [HOLE]
            numbers += [number] * len(one)
        short = length - len(ids)
        built.append([ids + [0] * short, target + [HOLE] * short, numbers + [0] * short])
    return torch.tensor(built, dtype=torch.int16).numpy()


class Rows:
    """A pool of training rows, made by all processors at once, from which steps take rows at random."""

    def __init__(self, count, length, seed, device, processes):
        share = -(-count // processes)
        jobs = [(share, length, seed * 1000 + i) for i in range(processes)]
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            parts = pool.map(packed, jobs)
        self.columns = torch.cat([torch.from_numpy(p) for p in parts]).to(device).unbind(1)
        self.rng = torch.Generator(device).manual_seed(seed)

    def draw(self, n):
        at = torch.randint(len(self.columns[0]), (n,), generator=self.rng, device=self.columns[0].device)
        return [c[at].long() for c in self.columns]


@torch.no_grad()
def scores(model, count, seed, device):
    """Counts of right answers among count unseen questions of each kind, of which every token has to be the likeliest.

    "result" and "results" are the answers to the results of one call and of two. "forced" is as if a grammar forced the
    names of the fields: the values count, and that they end.
    """
    draw, vocabulary = Draw(seed, test=True), CallVocabulary()
    found = {}
    for what in MIX:
        rows = [draw.conversation(what) for _ in range(count)]
        found[what] = exact(model, vocabulary, rows, 0, device, what == "forced")
        if what in ("call", "parallel"):
            found[what + " result"] = exact(model, vocabulary, rows, 1, device)
    return found


ENDS = ['",', ",", '"}', "}"]  # what ends a value


def exact(model, vocabulary, rows, turn, device, values=False):
    """How many of the rows' answers in a turn are right; values: how many have the right values in a JSON object."""
    right, ends = 0, torch.tensor([vocabulary.id(t) for t in ENDS], device=device)
    one = lambda ids: ids.where(~torch.isin(ids, ends), ends[0]) if values else ids
    for at in range(0, len(rows), 250):
        both = [encoded(vocabulary, turns, lambda i: i == turn) for turns in rows[at : at + 250]]
        width = max(len(ids) for ids, _ in both)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in both], device=device)
        asked = [(value_places(vocabulary, ids, l) if values else l) + [False] * (width - len(l)) for ids, l in both]
        asked = torch.tensor(asked, device=device)
        guess = model(ids, torch.ones_like(ids))[0].argmax(-1)
        right += ((one(guess)[:, :-1] == one(ids)[:, 1:]) | ~asked[:, 1:]).all(1).sum().item()
    return right


def value_places(vocabulary, ids, learned):
    """Which of the learned tokens of a JSON object are of values, or end them."""
    places, inside = [], False
    for token, l in zip(ids, learned):
        text = vocabulary.bytes[token].decode() if l else ""
        places.append(inside)
        inside = text == '":' or inside and text not in ENDS
    return places
