"""Writes expected.json: what transformers renders for templates/*.jinja.

    python3 -m venv venv && venv/bin/pip install transformers==5.23.0 jinja2==3.1.6
    venv/bin/python make_expected.py

The templates have the shapes of those that the families publish; the words in them are ours.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent


def turns(*pairs, **extra):
    return [{"role": r, "content": c} for r, c in pairs]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a "city" <now> & then: é',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "exact": 0.5}}},
        {"type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Basel\"}"}},
    ],
}
CHATS = {
    "one": (turns(("user", "Hi there")), None, {}),
    "three": (turns(("user", "1 + 1?"), ("assistant", "2"), ("user", " and\n+1? ")), None, {}),
    "answered": (turns(("user", "a"), ("assistant", "b")), None, {}),
    "system": (turns(("system", "Be <brief> & kind."), ("user", "Größe?"), ("assistant", "ok"), ("user", "日本語 😀")), None, {}),
    "wrong order": (turns(("assistant", "I first")), None, {}),
    "empty": (turns(("user", "")), None, {}),
    "no thinking": (turns(("user", "quick")), None, {"enable_thinking": False}),
    "thoughts": (
        turns(("user", "q1"), ("assistant", "<think>\nlong\nthought\n</think>\n\nanswer 1"), ("user", "q2"), ("assistant", "<think>\nshort\n</think>\n\nanswer 2")),
        None,
        {},
    ),
    "tools": (
        turns(("system", "Use tools."), ("user", "Weather?")) + [CALL, {"role": "tool", "content": '{"t": 7}'}, {"role": "tool", "content": "8"}] + turns(("assistant", "7 and 8")),
        [TOOL],
        {},
    ),
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

cases = []
for path in sorted((HERE / "templates").glob("*.jinja")):
    template = path.read_text()
    for name, (messages, tools, extra) in CHATS.items():
        for generate in (False, True):
            case = {"template": path.stem, "chat": name, "messages": messages, "tools": tools, "extra": extra, "generate": generate}
            try:
                out, _ = render_jinja_template(
                    conversations=[json.loads(json.dumps(messages))], tools=tools, chat_template=template, add_generation_prompt=generate, **TOKENS, **extra
                )
                case["want"] = out[0]
            except Exception as e:
                case["error"] = str(e)
            cases.append(case)
(HERE / "expected.json").write_text(json.dumps({"tokens": TOKENS, "cases": cases}, ensure_ascii=False, indent=1) + "\n")
