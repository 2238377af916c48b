"""Writes filters.json: what Jinja2's filters and tests make of values.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6
    venv/bin/python make_filters.py
"""

import json
import pathlib

import jinja2.sandbox

VARIABLES = {
    "text": "Hello wörld, hello",
    "name": "they're (the) o'neill-SMITH\tx",
    "pad": "  \n x y \t",
    "numbers": [3, 1, 2.5, -4, 3],
    "words": ["b", "A", "a", "C", "B"],
    "people": [
        {"name": "Eve", "age": 30, "job": {"title": "cook"}, "tags": ["x", "y"]},
        {"name": "bob", "age": 25, "job": {"title": "Baker"}, "tags": ["z"], "off": True},
        {"name": "Ann", "age": 30, "job": {}, "tags": [], "off": False},
    ],
    "d": {"b": 1, "a": 2},
    "none": None,
}
EXPRESSIONS = """
text | upper
text | lower
text | capitalize
text | title
name | title
name | capitalize
"" | title
"" | capitalize
"éA" | capitalize
pad | trim
pad | trim("\\n ")
"xxaxx" | trim(chars="x")
text | length
numbers | count
d | length
"" | length
5 | string
2.50 | string
true | string
[1, "a"] | string
"<a href='x'>&</a>" | e
"<b>" | escape
"<b>" | safe
-3 | abs
-3.5 | abs
3 | abs
7 | float
"2.5" | float
" 2.5 " | float
"x" | float
"x" | float(1.5)
"x" | float(default=2.5)
"42" | int
" 42 " | int
"-7" | int
"3.9" | int
-3.9 | int
"x" | int
"x" | int(5)
"x" | int(default=5)
"" | int
"ff" | int(base=16)
"0xFF" | int(0, 16)
"0b101" | int(0, 2)
"0o17" | int(0, 8)
true | int
none | int
none | float
2.4 | round
2.6 | round
-2.6 | round
2.44449 | round(2)
2.1 | round(method="ceil")
2.9 | round(0, "floor")
2.149 | round(precision=1, method="floor")
1234 | round(-2)
1250 | round(-2)
-1234.5 | round(-1)
7 | round
7 | round(0, "ceil")
2.5 | round
3.5 | round
0.125 | round(2)
2.675 | round(2)
1.5 | round(999)
2.5 | round(method="nope")
numbers | first
words | first
"é!" | first
d | first
numbers | max
numbers | min
words | max
words | min
words | max(case_sensitive=true)
words | min(case_sensitive=true)
people | max(attribute="age")
people | min(attribute="age")
"hello" | max
(people | map(attribute="name") | max)
numbers | sort
numbers | sort(reverse=true)
numbers | sort(true)
words | sort
words | sort(case_sensitive=true)
words | sort(reverse=true, case_sensitive=true)
d | sort
"bca" | sort
people | sort(attribute="name") | map(attribute="name") | list
people | sort(attribute="age,name") | map(attribute="name") | list
people | sort(attribute="age", reverse=true) | map(attribute="name") | list
[] | sort
[none, 1] | unique | list
"é" | upper
[1, 2, 3] | sum
[1, 2.5] | sum
[] | sum
[1, 2] | sum(start=10)
people | sum(attribute="age")
people | sum("age", 5)
[1, 2, 1, 2.0, 3] | unique | list
words | unique | list
words | unique(case_sensitive=true) | list
words | unique(true) | list
people | unique(attribute="age") | map(attribute="name") | list
[true, "true", none, "None"] | unique | list
words | map("lower") | list
[" a ", "b "] | map("trim") | list
numbers | map("int") | list
["x", "3"] | map("int", 9) | list
people | map(attribute="job.title") | list | length
people | map(attribute="job.title", default="none") | list
people | map(attribute="tags.0", default="-") | list
people | map(attribute="age") | sum
people | map(attribute="name") | map("upper") | join("+")
d | map("upper") | list
"ab" | map("upper") | list
none | map("upper") | list
[] | map("upper") | list
numbers | select | list
[0, 1, "", "a", none, [], [0]] | select | list
[0, 1, "", "a", none, [], [0]] | reject | list
numbers | select("odd") | list
numbers | select("gt", 2) | list
numbers | reject("lt", 2) | list
numbers | select("divisibleby", 3) | list
numbers | select("in", [1, 3]) | list
numbers | select("==", 3) | list
words | select("eq", "a") | list
words | reject("equalto", "a") | list
words | select("upper") | list
words | select("lower") | list
people | selectattr("off") | map(attribute="name") | list
people | rejectattr("off") | map(attribute="name") | list
people | selectattr("off", "defined") | map(attribute="name") | list
people | rejectattr("off", "defined") | map(attribute="name") | list
people | selectattr("age", "eq", 30) | map(attribute="name") | list
people | selectattr("age", "equalto", 30) | map(attribute="name") | list
people | rejectattr("age", "ge", 30) | map(attribute="name") | list
people | selectattr("job.title", "eq", "cook") | map(attribute="name") | list
people | selectattr("name", "in", ["bob", "Eve"]) | map(attribute="name") | list
missing | default("x")
missing | d("x")
missing | default
none | default("x", true)
"" | default("x")
"" | default("x", true)
"" | default("x", boolean=true)
missing | default(default_value="x")
0 | default(5, true)
0 | default(5)
5 is odd
4 is odd
-3 is odd
-4 is even
5 is even
5 is number
2.5 is number
"5" is number
5 is integer
5.0 is integer
5.0 is float
5 is float
true is boolean
1 is boolean
"a" is string
5 is string
[] is sequence
"a" is sequence
{} is sequence
5 is sequence
[] is iterable
"a" is iterable
{} is iterable
5 is iterable
{} is mapping
[] is mapping
none is none
0 is none
missing is defined
text is defined
missing is undefined
text is undefined
true is true
1 is true
false is false
0 is false
"abc" is lower
"Abc" is lower
"ABC" is upper
"ABc" is upper
range is callable
text is callable
9 is divisibleby 3
9 is divisibleby(4)
5 is eq 5
5 is equalto 5.0
5 is eq "5"
[1, 2] is eq [1, 2]
5 is ne 6
"a" is ne "a"
5 is gt 4
5 is gt 5
5 is ge 5
5 is lt 6
5 is le 4
"b" is gt "a"
"B" is lt "a"
"a" is le "a"
5 is greaterthan 4
5 is lessthan 4
1 is in [1, 2]
3 is in [1, 2]
"l" is in text
"b" is in d
"z" is in d
5 is not odd
[1, "a"] | sort
[1, "a"] | max
["a", {}] | sum
words | map("nothing") | list
words | select("nothing") | list
5 is gt "a"
[{}] | unique | list
5 | upper(1)
"a" | trim("a", "b")
"x" | int(nope=1)
5 is odd(1)
""".strip().split("\n")

env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
env.filters["tojson"] = lambda v: json.dumps(v, ensure_ascii=False)
cases = []
for expression in EXPRESSIONS:
    case = {"expression": expression}
    try:
        case["want"] = env.from_string("{{ (" + expression + ") | tojson }}").render(json.loads(json.dumps(VARIABLES)))
    except Exception as e:
        case["error"] = type(e).__name__
    cases.append(case)
HERE = pathlib.Path(__file__).parent
(HERE / "filters.json").write_text(json.dumps({"variables": VARIABLES, "cases": cases}, ensure_ascii=False, indent=1) + "\n")
