"""Holds moeserve to what the official Python client of the OpenAI API expects.

Usage: python_check.py MOESERVE, the path of a built binary. Needs the package openai.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import openai

BALL = "Ann gave the red ball to Ben. Who has the ball?"
BALL_IS = "Ben has the red ball."
KEY = "a key of this test"


def user(text):
    return [{"role": "user", "content": text}]


def check(what, got, want):
    if got != want:
        raise SystemExit(f"python_check: {what}: {got!r}, want {want!r}")


def fails(what, kind, param, call):
    try:
        call()
    except kind as e:
        check(what, e.param, param)
        return
    raise SystemExit(f"python_check: {what}: no {kind.__name__}")


def checks(address):
    client = openai.OpenAI(base_url=address + "/v1", api_key=KEY, max_retries=0, timeout=60)

    check("models", [m.id for m in client.models.list()], ["built-in"])
    check("a model", client.models.retrieve("built-in").owned_by, "moeserve")

    chat = client.chat.completions
    a = chat.create(model="built-in", messages=user(BALL), temperature=0, n=2, logprobs=True, top_logprobs=2)
    check("chat", [c.message.content for c in a.choices], [BALL_IS] * 2)
    check("finish reason", a.choices[0].finish_reason, "stop")
    check("usage", (a.usage.prompt_tokens, a.usage.completion_tokens, a.usage.total_tokens), (15, 14, 29))
    check("cached tokens", a.usage.prompt_tokens_details.cached_tokens, 0)
    first = a.choices[0].logprobs.content[0]
    check("log-probabilities", (first.token, bytes(first.bytes), len(first.top_logprobs)), ("Ben", b"Ben", 2))

    # An answer goes back as it came.
    more = user(BALL) + [a.choices[0].message.model_dump()] + user("1+2=")
    check("second turn", chat.create(model="built-in", messages=more, temperature=0).choices[0].message.content, "3")

    chunks = list(
        chat.create(
            model="built-in", messages=user(BALL), temperature=0, stream=True, stop=" ball",
            stream_options={"include_usage": True}, extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check("streamed chat", text, "Ben has the red")
    check("role first", chunks[0].choices[0].delta.role, "assistant")
    check("reason last", [c.choices[0].finish_reason for c in chunks if c.choices][-1], "stop")
    check("usage of a stream", chunks[-1].usage.prompt_tokens, 15)

    with chat.stream(model="built-in", messages=user("sort: d a c b =")) as stream:
        streamed = stream.get_final_completion().choices[0].message
    check("stream helper", streamed.content, "a b c d")

    # The helpers' messages, which have members of their own, go back as they came.
    parsed = chat.parse(model="built-in", messages=user(BALL), temperature=0).choices[0].message
    for message in (parsed, streamed):
        a = chat.create(model="built-in", messages=user(BALL) + [message] + user("1+2="), temperature=0)
        check("second turn of a helper", a.choices[0].message.content, "3")

    # Every token has a chunk, and every chunk the usage so far, which benchmarks read.
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="built-in", prompt="1+2=", max_tokens=5, stream=True, stream_options=options,
                                            extra_body={"ignore_eos": True}))
    check("continuous usage", [c.usage.completion_tokens for c in chunks], [1, 2, 3, 4, 5, 5])

    a = client.completions.create(model="built-in", prompt=["1+2=", BALL], temperature=0, logprobs=1)
    check("completions", [c.text for c in a.choices], ["3", BALL_IS])
    check("their log-probabilities", a.choices[0].logprobs.tokens[0], "3")
    a = client.completions.create(model="built-in", prompt=[1, 2, 3], max_tokens=2, extra_body={"ignore_eos": True})
    check("ids as prompt", (a.usage.completion_tokens, a.choices[0].finish_reason), (2, "length"))
    stream = client.completions.create(model="built-in", prompt=BALL, temperature=0, stream=True)
    check("streamed completion", "".join(c.choices[0].text for c in stream), BALL_IS)

    fails("a bad parameter", openai.BadRequestError, "temperature",
          lambda: chat.create(model="built-in", messages=user("x"), temperature=-1))
    fails("a long prompt", openai.BadRequestError, "prompt",
          lambda: client.completions.create(model="built-in", prompt="1+2=" * 100))
    fails("an unknown argument", openai.BadRequestError, "frobnicate",
          lambda: chat.create(model="built-in", messages=user("x"), extra_body={"frobnicate": 1}))
    fails("a parameter that is not done", openai.BadRequestError, "service_tier",
          lambda: chat.create(model="built-in", messages=user("x"), service_tier="flex"))
    fails("another model", openai.NotFoundError, "model",
          lambda: chat.create(model="gpt-5", messages=user("x")))
    fails("a wrong key", openai.AuthenticationError, None,
          lambda: client.with_options(api_key="wrong").models.list())


def tool_checks(address):
    """A call that the request names begins in the prompt, and the model's next two tokens, which biases choose, are its arguments."""
    client = openai.OpenAI(base_url=address + "/v1", api_key=KEY, max_retries=0, timeout=60)
    braces = client.post(address + "/tokenize", cast_to=object, body={"prompt": "{}", "add_special_tokens": False})["tokens"]
    check("tokens of braces", len(braces), 2)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    request = dict(
        model="with-tools", messages=user("Hi"), tools=tools, tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0, presence_penalty=2, logit_bias={braces[0]: 100, braces[1]: 99}, stop="}",
        extra_body={"include_stop_str_in_output": True},
    )

    def is_call(what, choice):
        message = choice.message
        check(what, (choice.finish_reason, message.content or None, len(message.tool_calls)), ("tool_calls", None, 1))
        call = message.tool_calls[0]
        check(what, (call.type, call.id[:5], call.function.name, call.function.arguments), ("function", "call_", "weather", "{}"))

    a = client.chat.completions.create(**request)
    is_call("a call", a.choices[0])
    with client.chat.completions.stream(**request) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    is_call("a streamed call", streamed)
    check("its end", [(e.name, e.arguments, e.index) for e in done], [("weather", "{}", 0)])

    # A call and its result go back as they came.
    for choice in (a.choices[0], streamed):
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "21"}
        b = client.chat.completions.create(model="with-tools", messages=user("Hi") + [choice.message, result], tools=tools, max_tokens=4)
        check("behind a result", b.choices[0].message.role, "assistant")
    fails("a tool that is not there", openai.BadRequestError, "tool_choice",
          lambda: client.chat.completions.create(**{**request, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "x"}}}))


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as dir:
        model = os.path.join(dir, "with-tools")
        shutil.copytree(os.path.join(here, "..", "..", "testdata", "fixtures", "qwen3_moe"), model)
        shutil.copy(os.path.join(here, "testdata", "tools.jinja"), os.path.join(model, "chat_template.jinja"))
        serve(dir, ["--offload-fraction", "0.5"], checks)
        serve(dir, ["--model", model], tool_checks)
    print(f"python_check: moeserve answers openai {openai.__version__} as it should")


def serve(dir, args, checks):
    """Runs checks on a server with these arguments."""
    env = dict(os.environ, MOESERVE_API_KEY=KEY)
    command = [os.path.abspath(sys.argv[1]), "serve", "--port", "0", *args]
    with subprocess.Popen(command, cwd=dir, env=env, stderr=subprocess.PIPE, text=True) as serve:
        address = None
        late = threading.Timer(60, serve.kill)
        late.start()
        try:
            for line in serve.stderr:
                found = re.search(r"msg=serving .*address=(http://\S+)", line)
                if found:
                    address = found[1]
                    break
                print(line, end="", file=sys.stderr)
            if not address:
                raise SystemExit("python_check: moeserve did not serve")
            late.cancel()
            checks(address)
        finally:
            late.cancel()
            serve.send_signal(signal.SIGTERM)
            print(serve.stderr.read(), end="", file=sys.stderr)
    check("moeserve's exit code", serve.returncode, 0)


main()
