"""Renders chat templates with jinja2, in the environment of transformers, for the tests of models/chat.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6
    venv/bin/python reference.py constructs              # writes models/chat/jinja/testdata/constructs.json
    venv/bin/python reference.py published DIR           # writes DIR/expected.json for DIR/*.jinja
    venv/bin/python reference.py fuzz COUNT SEED FILE    # writes FILE: COUNT random templates

    MOESERVE_TEMPLATES=DIR go test ./models/chat -run Published -v
    MOESERVE_TEMPLATE_FUZZ=FILE go test ./models/chat/jinja -run Differential -v

Published templates are their authors': they and what is made of them stay outside this repository.
"""

import datetime
import json
import pathlib
import random
import sys
import warnings

import jinja2
import jinja2.ext
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOW = datetime.datetime(2024, 7, 5, 9, 3, 7)


class Generation(Extension):
    """The generation tag of transformers, without its record of positions."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(lineno)

    def _call(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


ENV = environment()
warnings.simplefilter("ignore", SyntaxWarning)


def render(template, variables):
    """Returns the outcome of a rendering, as a part of a case."""
    try:
        if isinstance(template, str):
            template = ENV.from_string(template)
        text = template.render(**json.loads(json.dumps(variables)))
        text.encode()
        return {"want": text}
    except Exception as e:  # noqa: BLE001 whatever a template can raise
        return {"error": f"{type(e).__name__}: {e}"}


# --- single constructs ---

VARIABLES = {
    "a": 7,
    "f": 2.5,
    "big": 12345678901234567890,
    "t": True,
    "n": None,
    "s": "Hello wörld",
    "pad": "  x y \t\n",
    "quotes": "it's \"so\" <b>&</b>\\",
    "l": [3, 1, 2],
    "mixed": [1, "a", None, True, 2.5, [1], {"k": "v"}],
    "words": ["b", "A", "a", "C"],
    "d": {"b": 1, "a": {"x": [1, 2]}, "items": 3, "é": None},
    "people": [
        {"name": "Eve", "age": 30, "job": {"title": "cook"}, "tags": ["x", "y"]},
        {"name": "bob", "age": 25, "job": {"title": "Baker"}, "tags": []},
        {"name": "Ann", "age": 30, "job": {}, "off": True},
    ],
    "text": "Hello wörld, hello",
    "name": "they're (the) o'neill-SMITH\tx",
    "numbers": [3, 1, 2.5, -4, 3],
    "none": None,
    "messages": [
        {"role": "system", "content": "Be kind.\n"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": [1.0, 1e22]}}}]},
        {"role": "tool", "content": "ok"},
    ],
}

# Each line is a template.
CONSTRUCTS = (ROOT / "tools/templates/constructs.txt").read_text()


def constructs():
    cases = []
    for line in CONSTRUCTS.splitlines():
        if not line or line.startswith("## "):
            continue
        template = line.replace("⏎", "\n").replace("␍", "\r").replace("⇥", "\t")
        outcome = render(template, VARIABLES)
        if " at 0x" not in outcome.get("want", ""):  # the address of an object
            cases.append({"template": template, **outcome})
    return {"variables": VARIABLES, "cases": cases}


# --- published templates ---

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a "city" <now> & then: é',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City's name\nand country"},
                "days": {"type": "integer", "default": 3, "minimum": 1},
                "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
SIMPLE = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Zürich", "days": 2, "exact": 0.5, "id": 12345678901234567890, "deep": {"z": None, "a": [True, {"q": "it's"}]}}


def user(content="Hi there"):
    return {"role": "user", "content": content}


def assistant(content="Hello!", **more):
    return {"role": "assistant", "content": content, **more}


def call(name="get_weather", arguments=ARGUMENTS, id="call12345"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content='{"t": 7}', id="call12345", name="get_weather"):
    return {"role": "tool", "tool_call_id": id, "name": name, "content": content}


SYSTEM = {"role": "system", "content": " Be <brief> & kind.\n"}
PARTS = [{"type": "text", "text": "look: "}, {"type": "text", "text": "here"}]
IMAGE = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "what is it?"}]
CALLED = [user("Weather?"), assistant("", tool_calls=[call()]), result()]

CHATS = {
    "user": [user()],
    "spaces": [user("  two\n\nlines \n")],
    "unicode": [user("日本語 😀 é\u0301 \u200b")],
    "empty": [user("")],
    "system": [SYSTEM, user()],
    "turns": [user("1+1?"), assistant("2"), user(" and\n+1? ")],
    "system turns": [SYSTEM, user("a"), assistant(" b "), user("c"), assistant("d"), user("e")],
    "answered": [user("a"), assistant("b")],
    "assistant first": [assistant("I first"), user()],
    "two users": [user("a"), user("b")],
    "late system": [user("a"), SYSTEM, user("b")],
    "no messages": [],
    "null content": [user(), assistant(None), user("?")],
    "null user": [user(None)],
    "parts": [user(PARTS)],
    "system parts": [{"role": "system", "content": PARTS}, user(PARTS)],
    "assistant parts": [user("a"), assistant(PARTS), user("b")],
    "image": [user(IMAGE)],
    "think inside": [user("q1"), assistant("<think>\nlong\nthought\n</think>\n\nanswer 1"), user("q2"), assistant("<think>\nshort\n</think>\n\nanswer 2")],
    "reasoning_content": [user("q1"), assistant("a1", reasoning_content="because\n"), user("q2"), assistant("a2", reasoning_content="so")],
    "reasoning": [user("q1"), assistant("a1", reasoning="because"), user("q2")],
    "thinking": [user("q1"), assistant("answer", thinking="hm"), user("q2")],
    "calls": CALLED,
    "call alone": [user("Weather?"), assistant("", tool_calls=[call()])],
    "call null": [user("Weather?"), assistant(None, tool_calls=[call()]), result()],
    "call text": [user("Weather?"), assistant("I look.", tool_calls=[call()]), result(), assistant("7"), user("thanks")],
    "call string": [user("Weather?"), assistant("", tool_calls=[call(arguments=json.dumps(ARGUMENTS, ensure_ascii=False))]), result()],
    "call empty": [user("Time?"), assistant("", tool_calls=[call("now", {})]), result("12:00", name="now")],
    "calls two": [user("Weather?"), assistant("", tool_calls=[call(), call("now", {"x": 1}, "call67890")]), result(), result("8", "call67890", "now"), assistant("7 and 8")],
    "call thoughts": [user("W?"), assistant("", tool_calls=[call()], reasoning_content="look it up"), result(), assistant("7", reasoning_content="ok"), user("?")],
    "result parts": [user("Weather?"), assistant("", tool_calls=[call()]), {**result(), "content": PARTS}],
    "result object": [user("Weather?"), assistant("", tool_calls=[call()]), {**result(), "content": {"t": 7, "ok": True}}],
    "calls system": [SYSTEM, *CALLED, assistant("It is 7."), user("And tomorrow?")],
    "unknown role": [user(), {"role": "critic", "content": "bad"}],
    "named": [{"role": "user", "name": "Bob", "content": "hi"}],
}
OPTIONS = {
    "plain": {},
    "no thinking": {"enable_thinking": False},
    "thinking": {"enable_thinking": True, "thinking": True},
    "effort": {"reasoning_effort": "low", "model_identity": "You are X.", "builtin_tools": ["python", "browser"]},
    "documents": {"documents": [{"title": "T", "text": "some text", "doc_id": 1}]},
    "dates": {"date_string": "26 Jul 2024", "custom_tools": None, "tools_in_user_message": False, "keep_past_thinking": True},
}
TOOLS = {"none": None, "tools": [TOOL, SIMPLE]}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def published(folder):
    chats = []
    for name, messages in CHATS.items():
        for tools in TOOLS:
            for option, more in OPTIONS.items():
                if option != "plain" and name not in ("turns", "system turns", "reasoning_content", "calls", "call thoughts", "system"):
                    continue
                for generate in (False, True):
                    label = f"{name}/{tools}/{option}/{'generate' if generate else 'whole'}"
                    chats.append({"name": label, "messages": messages, "tools": TOOLS[tools], "options": more, "generate": generate})
    outcomes = {}
    for path in sorted(pathlib.Path(folder).glob("*.jinja")):
        text = path.read_bytes().decode()
        try:
            template = ENV.from_string(text)
        except jinja2.TemplateError as e:
            outcomes[path.name] = {"load": str(e)}
            continue
        outcomes[path.name] = {
            "cases": [
                render(
                    template,
                    {**TOKENS, "messages": c["messages"], "tools": c["tools"], "documents": None, "add_generation_prompt": c["generate"], **c["options"]},
                )
                for c in chats
            ]
        }
    return {"tokens": TOKENS, "chats": chats, "templates": outcomes}


# --- random templates ---

NAMES = ["a", "f", "big", "t", "n", "s", "pad", "quotes", "l", "mixed", "words", "d", "people", "zz", "x"]
LITERALS = ["0", "1", "-3", "2.5", "10", "1e3", "'b'", "'Ab c'", "''", "'é\\n'", '"\\\\"', "none", "true", "false", "[]", "{}", "[1, 'x']", "('a', 2)", "{'k': 1, 'j': none}"]
FILTERS = """abs|attr('b')|batch(2)|list batch(2,'x')|list capitalize count default('z') default('z',true) dictsort dictsort(by='value') dictsort(true,reverse=true) e first float format(1,'b')
    forceescape groupby('age') groupby('age')|list indent indent(2,true) indent(width='>',blank=true) int int(5) items|list join join('-') join(',',attribute='name') last length list lower
    map('upper')|list map(attribute='name')|list map(attribute='job.title',default='-')|list max min max(attribute='age') reject('none')|list rejectattr('off')|list replace('b','XX')
    replace('','-',3) reverse reverse|list round round(1) round(1,'floor') round(-1) safe select|list select('string')|list selectattr('age','gt',26)|list selectattr('job.title','defined')|list
    slice(2)|list sort sort(reverse=true) sort(attribute='age,name') sort(case_sensitive=true) string sum sum(attribute='age') title tojson tojson(indent=2) tojson(sort_keys=true)
    tojson(separators=(',',':')) tojson(ensure_ascii=true) trim trim('ab ') truncate(5) truncate(5,true) unique|list upper urlencode wordcount xmlattr filesizeformat"""
FILTERS = FILTERS.split()
TESTS = """defined undefined none string number integer float boolean true false mapping iterable sequence callable odd even divisibleby(2) eq(1) ne('b') gt(1) in([1,'b']) lower upper sameas(none)
    escaped filter test ==(2) lt('b')""".split()
METHODS = """upper() lower() strip() strip('x ') lstrip() rstrip('\\n') split() split('b') split(none,1) split('b',1) rsplit(none,1) splitlines() splitlines(true) title() capitalize() swapcase() startswith('H')
    endswith(('d','x')) find('l') rfind('l') count('l') index('l') replace('l','LL') replace('l','L',1) join(words) zfill(12) center(14,'*') ljust(14)|e rjust(14,'.') partition('l') rpartition('l') removeprefix('He')
    removesuffix('d') isdigit() isalpha() isspace() isupper() islower() istitle() isalnum() expandtabs(4) format(1,k=2) items()|list keys()|list values()|list get('b') get('zz') get('zz',9) count(1) copy() index(1)
    casefold() isidentifier() append(1) pop update({})""".split()
OPERATORS = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]


STRINGS = """'' 'a' 'aXbXc' 'é😀é' 'ΑΣΣ' 'ßŉǆ' 'İI' 'ﬁx' 'a\\nb\\r\\nc\\x0bd\\u2028e\\x85' '\\ta\\tbc\\t' '-7' '+3.5' 'brown-fox(x)[y]' "they're" 'x,y,,z,' 'ＡＢ１' '日本語' '½²٣'
    'a_b1' '<b>&"' 'ａ\\u3000ｂ' 'ǅ' '\\xa0x\\xa0' s pad quotes text name""".split()
ARGUMENTS_OF_METHODS = "'' 'a' 'X' ',' none 1 -1 0 2 99 true 'é' '\\n' ('a','b') ['a'] 'ab' 'xyz' 1.5 s '😀'".split()
STRING_METHODS = """capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
    join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill""".split()


class Random:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def pick(self, list):
        return self.r.choice(list)

    def expr(self, depth):
        kind = self.r.random()
        if depth <= 0 or kind < 0.2:
            return self.pick(NAMES) if self.r.random() < 0.6 else self.pick(LITERALS)
        e = lambda: self.expr(depth - 1)  # noqa: E731
        if kind < 0.22:
            return f"{e()} ** {self.pick(['2', '-1', '0.5', '3'])}"
        if kind < 0.38:
            return f"{e()} {self.pick(OPERATORS)} {e()}"
        if kind < 0.56:
            return f"{e()}|{self.pick(FILTERS)}"
        if kind < 0.64:
            return f"{e()} is {self.pick(['', 'not '])}{self.pick(TESTS)}"
        if kind < 0.76:
            return f"{self.pick(NAMES + ['(' + e() + ')'])}.{self.pick(METHODS)}"
        if kind < 0.84:
            keys = ["0", "-1", "'b'", "'name'", "1:", ":-1", "::-1", "::2", "1:2", e(), f"{e()}:{e()}"]
            of = e()
            while not any(name in of for name in ("people", "words", "mixed", "pad", "quotes")):
                of = e()  # jinja2 makes undefined of a slice of constants that raises at any other place
            return f"({of})[{self.pick(keys)}]"
        if kind < 0.88:
            return f"({e()} if {e()} else {e()})"
        if kind < 0.90:
            return f"({e()} if {e()})"
        if kind < 0.92:
            return f"{self.pick(['not ', '-', '+'])}{e()}"
        if kind < 0.94:
            return f"[{e()}, {e()}]"
        if kind < 0.96:
            return f"{{{self.pick(LITERALS)}: {e()}}}"
        if kind < 0.98:
            return f"{self.pick(['%s', '%5.1f|', '%-6s|', '%05d', '%x', '%r'])!r} % ({e()})"
        spec = self.pick(["{}", "{:>8}", "{:05d}", "{:.2f}", "{!r:^9}", "{0:,}", "{:+}", "{:e}", "{:x}", "{0[0]}", "{:_^7}"])
        return f"{spec!r}.format({e()})"

    def number(self):
        some = [0, 1, 7, -255, 1234567, 10**18, -(10**20), 0.5, 2.5, 1e16, 99999.5, self.r.uniform(-10, 10), self.r.uniform(-1, 1) * 10 ** self.r.randint(-12, 25)]
        return f"({self.pick(some)!r})" if self.r.random() < 0.9 else self.pick(["true", "none", "'ab'", "[1]"])

    def format(self):
        """A format specification, and a number or what is none."""
        if self.r.random() < 0.6:
            parts = [["", "", "<", ">", "^", "=", "*<", "0>"], ["", "", "+", "-", " "], ["", "", "#"], ["", "", "0"], ["", "8", "12"], ["", "", ",", "_"], ["", "", ".2", ".0"], ["", *"dfegxXob%EGsnc"]]
            return "{{ '{:" + "".join(map(self.pick, parts)) + "}'.format(" + self.number() + ") }}"
        parts = [["", "-", "+", " ", "0", "#", "-0", "+0"], ["", "8", "3"], ["", "", ".2", ".0", ".5"], "sdfegxXoGEricuaF"]
        return "{{ '%" + "".join(map(self.pick, parts)) + "' % " + self.number() + " }}"

    def method(self):
        """A method of a string, with arguments that fit seldom."""
        arguments = ", ".join(self.pick(ARGUMENTS_OF_METHODS) for _ in range(self.pick([0, 0, 1, 1, 2, 3])))
        return "{{ [" + self.pick(STRINGS) + "." + self.pick(STRING_METHODS) + "(" + arguments + ")] }}"

    def template(self):
        kind = self.r.random()
        if kind < 0.45:
            return self.show(4)
        if kind < 0.75:
            return self.body(3)
        return self.format() if kind < 0.87 else self.method()

    def space(self):
        return self.pick(["", "", "", " ", "\n", "  \n ", "\n\n", "x", " y ", "\t", "é\n"])

    def tag(self, body):
        return "{%" + self.pick(["", "", "", "-", "+"]) + " " + body + " " + self.pick(["", "", "", "-"]) + "%}"

    def show(self, depth):
        return "{{" + self.pick(["", "", "-"]) + " " + self.expr(depth) + " " + self.pick(["", "", "-"]) + "}}"

    def body(self, depth):
        out = self.space()
        for _ in range(self.r.randint(1, 3)):
            out += self.statement(depth) + self.space()
        return out

    def statement(self, depth):
        kind = self.r.random()
        if depth <= 0 or kind < 0.35:
            return self.show(2)
        if kind < 0.42:
            return "{#" + self.pick(["", "-"]) + " note " + self.pick(["", "-"]) + "#}"
        if kind < 0.55:
            other = self.tag("else") + self.body(depth - 1) if self.r.random() < 0.5 else ""
            return self.tag("if " + self.expr(2)) + self.body(depth - 1) + other + self.tag("endif")
        if kind < 0.72:
            head = self.pick(["x in l", "x in " + self.expr(1), "k, x in d.items()", "x in words if x != 'a'", "x in people", "x in range(3)"])
            inside = self.pick(["", "{{ loop.index }}", "{{ loop.last }}{{ loop.length }}", "{{ loop.previtem }}", self.tag("if x == 1") + self.tag("break") + self.tag("endif"), self.tag("if loop.first") + self.tag("continue") + self.tag("endif")])
            other = self.tag("else") + self.body(depth - 1) if self.r.random() < 0.2 else ""
            return self.tag("for " + head) + inside + self.body(depth - 1) + other + self.tag("endfor")
        if kind < 0.82:
            return self.tag(f"set {self.pick(['x', 'zz', 's'])} = {self.expr(2)}")
        if kind < 0.86:
            return self.tag("set x") + self.body(depth - 1) + self.tag("endset")
        if kind < 0.90:
            return self.tag("set ns = namespace(x=1)") + self.tag("for i in l") + self.tag("set ns.x = ns.x + i") + self.tag("endfor") + "{{ ns.x }}"
        if kind < 0.94:
            return self.tag("macro m(x, y=2)") + self.body(depth - 1) + self.tag("endmacro") + self.pick(["{{ m(1) }}", "{{ m(l, y=s) }}", "{{ m() }}", self.tag("call m(1)") + "c" + self.tag("endcall")])
        if kind < 0.97:
            return self.tag("filter " + self.pick(["upper", "trim", "indent(2)", "replace('x','')"])) + self.body(depth - 1) + self.tag("endfilter")
        return self.tag(f"with x = {self.expr(1)}") + self.body(depth - 1) + self.tag("endwith")


def fuzz(count, seed):
    cases = []
    rng = Random(seed)
    while len(cases) < count:
        template = rng.template()
        outcome = render(template, VARIABLES)
        want = outcome.get("want", "")
        if " at 0x" in want.lower() or len(want) > 20_000:
            continue  # addresses of objects
        if "error" in outcome and rng.r.random() < 0.8:
            continue  # most random expressions raise
        cases.append({"template": template, **outcome})
    return {"variables": VARIABLES, "cases": cases}


def write(path, value):
    pathlib.Path(path).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["constructs"]:
            write(ROOT / "models/chat/jinja/testdata/constructs.json", constructs())
        case ["published", folder]:
            write(pathlib.Path(folder) / "expected.json", published(folder))
        case ["fuzz", count, seed, file]:
            write(file, fuzz(int(count), int(seed)))
        case _:
            sys.exit(__doc__)
