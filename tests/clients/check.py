"""Runs client software of others against moeserve, and writes what each can do as a page.

Usage: check.py MOESERVE PAGE [CLIENT...], the path of a built binary and that of the page
(docs/reference/clients.md). Where clients are named, only they are run, and the page keeps the rows of the others.
Needs the packages of python.txt, and in directories of CLIENTS what make clients installs there. A row says that a
client can do something where that worked, and that it cannot where the server refused it, naming what this file
expects: anything else is an error, so that the page is as the clients are.
"""

import asyncio
import glob
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import typing

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FIXTURES = os.path.join(ROOT, "testdata", "fixtures")
PROGRAMS = os.environ.get("CLIENTS", os.path.join(ROOT, "build", "clients"))
KEY = "a key of this test"
BALL = "Ann gave the red ball to Ben. Who has the ball?"
BALL_IS = "Ben has the red ball."
SCHEMA = {"type": "object", "properties": {"owner": {"enum": ["Ann", "Ben"]}}, "required": ["owner"], "additionalProperties": False}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}

os.environ.update(
    HF_HUB_OFFLINE="1", OPENAI_AGENTS_DISABLE_TRACING="1", LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR",
    OPENAI_API_KEY=KEY, ANTHROPIC_API_KEY=KEY, TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1",
)

# At: the built-in model; tools: a model of random weights whose chat template has tools.
AT = TOOLS = None
CHECKS = []


def does(client, what, refused=""):
    """Adds a check. refused is what the error must say where the server refuses."""

    def add(f):
        CHECKS.append((client, what, refused, f))
        return f

    return add


def equal(got, want):
    if got != want:
        raise AssertionError(f"{got!r}, want {want!r}")


def owner():
    """A model of pydantic whose JSON is short."""
    import pydantic

    return pydantic.create_model("Owner", owner=(typing.Literal["Ann", "Ben"], ...))


def is_owner(o):
    o = o if isinstance(o, dict) else o.model_dump()
    if set(o) != {"owner"} or o["owner"] not in ("Ann", "Ben"):
        raise AssertionError(o)


def user(text):
    return [{"role": "user", "content": text}]


def braces():
    """Biases that have the model write "{" and then "}", the arguments of a call that a request begins."""
    import urllib.request

    r = urllib.request.Request(TOOLS + "/tokenize", json.dumps({"prompt": "{}", "add_special_tokens": False}).encode(),
                               {"Content-Type": "application/json", "Authorization": "Bearer " + KEY})
    first, second = json.loads(urllib.request.urlopen(r).read())["tokens"]
    return {"logit_bias": {str(first): 100, str(second): 99}, "presence_penalty": 2, "temperature": 0}


# --- openai

def openai_client(**more):
    import openai

    return openai.OpenAI(base_url=AT + "/v1", api_key=KEY, max_retries=0, timeout=60).with_options(**more)


def at_tools(client):
    return client.with_options(base_url=TOOLS + "/v1")


@does("openai", "chat, whole and streamed; a second turn")
def _():
    c = openai_client().chat.completions
    a = c.create(model="built-in", messages=user(BALL), temperature=0)
    equal(a.choices[0].message.content, BALL_IS)
    equal("".join(k.choices[0].delta.content or "" for k in c.create(model="built-in", messages=user(BALL), temperature=0, stream=True)), BALL_IS)
    equal(c.create(model="built-in", messages=user(BALL) + [a.choices[0].message] + user("1+2="), temperature=0).choices[0].message.content, "3")


@does("openai", "completions with `echo` and `logprobs`, with `max_tokens` 0")
def _():
    a = openai_client().completions.create(model="built-in", prompt="1+2=3", max_tokens=0, echo=True, logprobs=1)
    l = a.choices[0].logprobs
    equal((a.choices[0].text, l.tokens, l.token_logprobs[0], l.text_offset), ("1+2=3", ["1", "+", "2", "=", "3"], None, [0, 1, 2, 3, 4]))
    if not l.token_logprobs[-1] > -0.1:
        raise AssertionError(l)


@does("openai", "`responses.create`, whole and streamed; a second turn with its output")
def _():
    c = openai_client().responses
    r = c.create(model="built-in", input=BALL, temperature=0)
    equal((r.output_text, r.status, r.usage.input_tokens), (BALL_IS, "completed", 15))
    events = list(c.create(model="built-in", input=BALL, temperature=0, stream=True))
    equal([e.sequence_number for e in events], list(range(len(events))))
    equal("".join(e.delta for e in events if e.type == "response.output_text.delta"), BALL_IS)
    with c.stream(model="built-in", input=BALL, temperature=0) as s:
        s.until_done()
        equal(s.get_final_response().output_text, BALL_IS)
    again = user(BALL) + [o.model_dump() for o in r.output] + user("1+2=")
    equal(c.create(model="built-in", input=again, temperature=0).output_text, "3")


@does("openai", "function tools in chats and responses")
def _():
    c = at_tools(openai_client())
    bias = braces()
    r = c.responses.create(model="with-tools", input="Hi", max_output_tokens=2, extra_body=bias, tools=[{"type": "function", "name": "weather", "parameters": WEATHER}],
                           tool_choice={"type": "function", "name": "weather"})
    call = r.output[0]
    equal((call.type, call.name, call.arguments), ("function_call", "weather", "{}"))
    back = user("Hi") + [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
    equal(c.responses.create(model="with-tools", input=back, max_output_tokens=4).status, "incomplete")
    a = c.chat.completions.create(model="with-tools", messages=user("Hi"), max_tokens=2, logit_bias=bias["logit_bias"], presence_penalty=2, temperature=0,
                                  tools=[{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
                                  tool_choice={"type": "function", "function": {"name": "weather"}})
    equal(a.choices[0].message.tool_calls[0].function.name, "weather")
    # A call that the model must make, its arguments by their schema, and the answer to its result.
    c = openai_client().chat.completions
    request = dict(model="built-in", messages=user("Hi"), tools=[{"type": "function", "function": {"name": "give", "parameters": SCHEMA}}],
                   tool_choice="required", temperature=0, max_tokens=64)
    with c.stream(**request) as s:
        streamed = s.get_final_completion().choices[0]
    for one in (c.create(**request).choices[0], streamed):
        equal((one.finish_reason, one.message.tool_calls[0].function.name), ("tool_calls", "give"))
        is_owner(json.loads(one.message.tool_calls[0].function.arguments))
        back = user("Hi") + [one.message, {"role": "tool", "tool_call_id": one.message.tool_calls[0].id, "content": BALL}]
        equal(c.create(model="built-in", messages=back, temperature=0).choices[0].message.content, BALL_IS)


@does("openai", "its asynchronous client, 16 streams at once")
def _():
    import openai

    async def all():
        async with openai.AsyncOpenAI(base_url=AT + "/v1", api_key=KEY, max_retries=0, timeout=60) as c:
            async def one():
                stream = await c.chat.completions.create(model="built-in", messages=user(BALL), temperature=0, stream=True)
                return "".join([k.choices[0].delta.content or "" async for k in stream])

            return await asyncio.gather(*(one() for _ in range(16)))

    equal(asyncio.run(all()), [BALL_IS] * 16)


@does("openai", "`response_format` `json_object`")
def _():
    a = openai_client().chat.completions.create(model="built-in", messages=user("Ann put the red ball in the barn. JSON with name color"),
                                                response_format={"type": "json_object"}, temperature=0, max_tokens=128)
    equal(json.loads(a.choices[0].message.content), {"name": "Ann", "color": "red"})


@does("openai", "stored responses (`previous_response_id`)", "nothing is stored")
def _():
    openai_client().responses.create(model="built-in", input=BALL, previous_response_id="resp_1")


@does("openai", "`parse` with a schema, of chats and of responses")
def _():
    c = openai_client()
    is_owner(c.chat.completions.parse(model="built-in", messages=user(BALL), response_format=owner()).choices[0].message.parsed)
    is_owner(c.responses.parse(model="built-in", input=BALL, text_format=owner()).output_parsed)


@does("openai", "embeddings", "does not do embeddings")
def _():
    openai_client().embeddings.create(model="built-in", input="x")


# --- anthropic

# Its methods have no parameter temperature.
GREEDY = {"extra_body": {"temperature": 0}}


def anthropic_client(at=None):
    import anthropic

    return anthropic.Anthropic(base_url=at or AT, api_key=KEY, max_retries=0, timeout=60)


@does("anthropic", "`messages.create`, whole and streamed, with a system message; a second turn")
def _():
    c = anthropic_client().messages
    m = c.create(model="built-in", max_tokens=32, system="Be right.", messages=user(BALL), **GREEDY)
    equal((m.content[0].text, m.stop_reason), (BALL_IS, "end_turn"))
    with c.stream(model="built-in", max_tokens=32, messages=user(BALL), stop_sequences=[" ball"], **GREEDY) as s:
        equal("".join(s.text_stream), "Ben has the red")
        final = s.get_final_message()
    equal((final.stop_reason, final.stop_sequence), ("stop_sequence", " ball"))
    names = [e.type for e in c.create(model="built-in", max_tokens=32, messages=user(BALL), stream=True, **GREEDY)]
    equal((names[0], names[-2], names[-1]), ("message_start", "message_delta", "message_stop"))
    again = user(BALL) + [{"role": m.role, "content": m.content}] + user("1+2=")
    equal(c.create(model="built-in", max_tokens=32, messages=again, **GREEDY).content[0].text, "3")


@does("anthropic", "`count_tokens`; errors as its own classes")
def _():
    import anthropic

    c = anthropic_client()
    equal(c.messages.count_tokens(model="built-in", messages=user(BALL)).input_tokens, 15)
    for kind, call in (
        (anthropic.BadRequestError, lambda: c.messages.create(model="built-in", max_tokens=1, messages=user("x"), extra_body={"temperature": -1})),
        (anthropic.NotFoundError, lambda: c.messages.create(model="x", max_tokens=1, messages=user("x"))),
        (anthropic.AuthenticationError, lambda: c.with_options(api_key="wrong").messages.create(model="built-in", max_tokens=1, messages=user("x"))),
    ):
        try:
            call()
        except kind as e:
            equal(e.body["type"], "error")
        else:
            raise AssertionError(f"no {kind.__name__}")


@does("anthropic", "tools: `tool_use`, streamed too, and `tool_result`")
def _():
    c = anthropic_client(TOOLS).messages
    request = dict(model="with-tools", max_tokens=2, messages=user("Hi"), tools=[{"name": "weather", "input_schema": WEATHER}],
                   tool_choice={"type": "tool", "name": "weather"}, extra_body=braces())
    m = c.create(**request)
    with c.stream(**request) as s:
        streamed = s.get_final_message()
    for one in (m, streamed):
        equal((one.content[0].type, one.content[0].name, one.content[0].input), ("tool_use", "weather", {}))
    again = user("Hi") + [{"role": "assistant", "content": m.content},
                          {"role": "user", "content": [{"type": "tool_result", "tool_use_id": m.content[0].id, "content": "21"}]}]
    equal(c.create(model="with-tools", max_tokens=4, messages=again).role, "assistant")


@does("anthropic", "images", "the model reads text only")
def _():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    anthropic_client().messages.create(model="built-in", max_tokens=1, messages=[{"role": "user", "content": [image]}])


# --- litellm

def litellm_kwargs(provider="openai/"):
    import litellm

    litellm.suppress_debug_info = True
    return dict(model=provider + "built-in", api_base=AT + "/v1", api_key=KEY, timeout=60, num_retries=0)


@does("litellm", "`completion` (`openai/`, `hosted_vllm/`), whole and streamed; a second turn with its message")
def _():
    import litellm

    for provider in ("openai/", "hosted_vllm/"):
        k = litellm_kwargs(provider)
        a = litellm.completion(messages=user(BALL), temperature=0, **k)
        equal(a.choices[0].message.content, BALL_IS)
        equal("".join(x.choices[0].delta.content or "" for x in litellm.completion(messages=user(BALL), temperature=0, stream=True, **k)), BALL_IS)
        equal(litellm.completion(messages=user(BALL) + [a.choices[0].message] + user("1+2="), temperature=0, **k).choices[0].message.content, "3")


@does("litellm", "`text_completion`, `responses()`")
def _():
    import litellm

    equal(litellm.text_completion(prompt="1+2=", temperature=0, **litellm_kwargs("text-completion-openai/")).choices[0].text, "3")
    r = litellm.responses(input=BALL, temperature=0, **litellm_kwargs())
    equal(r.output[0].content[0].text, BALL_IS)


@does("litellm", "`anthropic.messages` against `/v1/messages` (`anthropic/`)")
def _():
    import litellm

    a = litellm.completion(model="anthropic/built-in", api_base=AT, api_key=KEY, messages=user(BALL), temperature=0, max_tokens=32)
    equal(a.choices[0].message.content, BALL_IS)


@does("litellm", "tools: the call that `tool_choice` requires, whole and streamed, and the answer to its result (`openai/`, `hosted_vllm/`)")
def _():
    import litellm

    for provider in ("openai/", "hosted_vllm/"):
        k = litellm_kwargs(provider)
        request = dict(messages=user("Hi"), tools=[{"type": "function", "function": {"name": "give", "parameters": SCHEMA}}], tool_choice="required", temperature=0, max_tokens=64, **k)
        chunks = list(litellm.completion(stream=True, **request))
        for a in (litellm.completion(**request), litellm.stream_chunk_builder(chunks)):
            message = a.choices[0].message
            equal(message.tool_calls[0].function.name, "give")
            is_owner(json.loads(message.tool_calls[0].function.arguments))
            back = user("Hi") + [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": BALL}]
            equal(litellm.completion(messages=back, temperature=0, **k).choices[0].message.content, BALL_IS)


@does("litellm", "`embedding`", "does not do embeddings")
def _():
    import litellm

    litellm.embedding(input=["x"], **litellm_kwargs())


@does("litellm", "`response_format` with a schema")
def _():
    import litellm

    a = litellm.completion(messages=user(BALL), response_format={"type": "json_schema", "json_schema": {"name": "owner", "schema": SCHEMA}}, **litellm_kwargs())
    is_owner(json.loads(a.choices[0].message.content))


# --- langchain-openai

def langchain(**more):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**{**dict(base_url=AT + "/v1", api_key=KEY, model="built-in", temperature=0, max_retries=0), **more})


@does("langchain-openai", "`invoke`, `stream`, `batch`, a second turn; with `use_responses_api`, too")
def _():
    for more in ({}, {"use_responses_api": True}):
        m = langchain(**more)
        a = m.invoke(BALL)
        equal(a.text, BALL_IS)
        equal("".join(x.text for x in m.stream(BALL)), BALL_IS)
        equal([x.text for x in m.batch([BALL, "1+2="])], [BALL_IS, "3"])
        equal(m.invoke([("user", BALL), a, ("user", "1+2=")]).text, "3")


@does("langchain-openai", "`bind_tools`: the call that `tool_choice` requires, and the answer to its result; with `use_responses_api`, too")
def _():
    from langchain_core.messages import ToolMessage

    def weather(city: str) -> str:
        """Weather of a city."""
        return "21"

    m = langchain(base_url=TOOLS + "/v1", model="with-tools", max_tokens=4).bind_tools([weather])
    equal(m.invoke("Hi").type, "ai")

    def give() -> str:
        """Who has the ball?"""

    for more in ({}, {"use_responses_api": True}):
        m = langchain(**more)
        a = m.bind_tools([give], tool_choice="any").invoke("Hi")
        equal([(c["name"], c["args"]) for c in a.tool_calls], [("give", {})])
        equal(m.bind_tools([give]).invoke([("user", "Hi"), a, ToolMessage(BALL, tool_call_id=a.tool_calls[0]["id"])]).text, BALL_IS)


@does("langchain-openai", "`with_structured_output` (`json_schema`, `function_calling`)")
def _():
    is_owner(langchain().with_structured_output({**SCHEMA, "title": "owner"}, method="json_schema").invoke(BALL))
    is_owner(langchain().with_structured_output(owner(), method="function_calling").invoke(BALL))


# --- pydantic-ai

def pydantic_model(kind):
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]("built-in", provider=OpenAIProvider(base_url=AT + "/v1", api_key=KEY))


@does("pydantic-ai", "text, a second turn, streamed: by chats and by responses")
def _():
    from pydantic_ai import Agent

    for kind in ("chat", "responses"):
        agent = Agent(pydantic_model(kind), model_settings={"temperature": 0, "max_tokens": 32})
        a = agent.run_sync(BALL)
        equal((kind, a.output), (kind, BALL_IS))
        equal((kind, agent.run_sync("1+2=", message_history=a.all_messages()).output), (kind, "3"))

        async def streamed():
            async with agent.run_stream(BALL) as s:
                return await s.get_output()

        equal((kind, asyncio.run(streamed())), (kind, BALL_IS))


@does("pydantic-ai", "`NativeOutput`")
def _():
    from pydantic_ai import Agent, NativeOutput

    is_owner(Agent(pydantic_model("chat"), output_type=NativeOutput(owner())).run_sync(BALL).output)


@does("pydantic-ai", "`output_type` by a call of a tool, its default: by chats and by responses")
def _():
    from pydantic_ai import Agent

    for kind in ("chat", "responses"):
        is_owner(Agent(pydantic_model(kind), output_type=owner(), model_settings={"temperature": 0, "max_tokens": 64}).run_sync(BALL).output)


# --- openai-agents

OPEN = []  # clients, which would close in whatever event loop runs when they are collected


def agent(kind="responses", **more):
    import agents
    import openai

    c = openai.AsyncOpenAI(base_url=more.pop("at", AT) + "/v1", api_key=KEY, max_retries=0)
    OPEN.append(c)
    model = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}[kind](more.pop("model", "built-in"), c)
    return agents.Agent(name="a", model=model, model_settings=agents.ModelSettings(temperature=0, max_tokens=64), **more)


@does("openai-agents", "runs, streamed too, a second turn: by responses, its default, and by chats")
def _():
    import agents

    for kind in ("responses", "chat"):
        a = agents.Runner.run_sync(agent(kind), BALL)
        equal((kind, a.final_output), (kind, BALL_IS))
        equal(agents.Runner.run_sync(agent(kind), a.to_input_list() + user("1+2=")).final_output, "3")

        async def streamed():
            s = agents.Runner.run_streamed(agent(kind), BALL)
            async for _ in s.stream_events():
                pass
            return s.final_output

        equal((kind, asyncio.run(streamed())), (kind, BALL_IS))


@does("openai-agents", "function tools go with the conversation")
def _():
    import agents

    @agents.function_tool(strict_mode=False)
    def weather(city: str = "") -> str:
        """Weather of a city."""
        return "21"

    agents.Runner.run_sync(agent("chat", at=TOOLS, model="with-tools", tools=[weather]), "Hi")


@does("openai-agents", "`output_type`")
def _():
    import agents

    is_owner(agents.Runner.run_sync(agent(output_type=owner()), BALL).final_output)


for client, example in (("openai-agents", "openai_agents.py"), ("pydantic-ai", "pydantic_ai_agent.py")):
    @does(client, "[an agent](../guide/agents.md) whose model chooses to call a tool, and answers its result: by responses and by chats")
    def _(example=example):
        path = os.path.join(ROOT, "examples", "agents", example)
        r = subprocess.run([sys.executable, path, AT], capture_output=True, text=True, timeout=120, env={**os.environ, "MOESERVE_API_KEY": KEY})
        equal((r.stdout, r.returncode, r.stderr[-3000:] if r.returncode else ""), ("get_weather('Paris', 'today')\nIt will be sunny in Paris.\n" * 2, 0, ""))


# --- lm-eval

def fixture(name):
    """ids and logits of the reference's prompts of a fixture."""
    import numpy

    with open(os.path.join(FIXTURES, name, "expected.safetensors"), "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()

    def tensor(name):
        x = header[name]
        of = {"F32": "<f4", "I64": "<i8", "I32": "<i4"}[x["dtype"]]
        return numpy.frombuffer(data[slice(*x["data_offsets"])], of).reshape(x["shape"])

    return [(tensor(f"ids{i}").tolist(), tensor(f"logits{i}").astype("f8")) for i in range(4)]


def lm_eval_model(at, name, length):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(model=name, base_url=at + "/v1/completions", tokenizer_backend="remote", max_length=length, num_concurrent=2, auth_token=KEY)


@does("lm-eval", "`loglikelihood`: the numbers of transformers' logits, of models of each family")
def _():
    for name in ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe"):
        with tempfile.TemporaryDirectory() as dir, Server(dir, "--model", os.path.join(FIXTURES, name)) as at:
            loglikelihoods(name, lm_eval_model(at, name, 256))


def loglikelihoods(name, model):
    import numpy

    requests, want = [], []
    for ids, logits in fixture(name):
        log_probs = logits - logits.max(1, keepdims=True)
        log_probs -= numpy.log(numpy.exp(log_probs).sum(1, keepdims=True))
        for at in sorted({1, len(ids) // 2, len(ids) - 1}):
            if not 0 < at < len(ids):
                continue
            requests.append((("", str(len(requests))), ids[:at], ids[at:]))
            rows = log_probs[at - 1:len(ids) - 1]
            want.append((sum(rows[i, t] for i, t in enumerate(ids[at:])), bool((rows.argmax(1) == ids[at:]).all())))
    got = model._loglikelihood_tokens(requests)
    equal(len(got), len(want))
    for (lp, greedy), (want_lp, want_greedy), (_, context, rest) in zip(got, want, requests):
        if not math.isclose(lp, want_lp, abs_tol=1e-4 * len(rest)) or greedy != want_greedy:
            raise AssertionError(f"{name}, {len(context)} and {len(rest)} tokens: {lp}, {greedy}, want {want_lp}, {want_greedy}")


@does("lm-eval", "tasks of `multiple_choice`, `loglikelihood_rolling` and `generate_until`, with `tokenizer_backend=remote`")
def _():
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.chdir(os.path.join(HERE, "tasks"))
    model = lm_eval_model(AT, "built-in", 256)
    found = lm_eval.simple_evaluate(model=model, tasks=["moeserve_choice", "moeserve_rolling", "moeserve_generate"],
                                    task_manager=TaskManager(include_path=os.path.join(HERE, "tasks"), include_defaults=False))["results"]
    equal(found["moeserve_choice"]["acc,none"], 1.0)
    equal(found["moeserve_generate"]["exact_match,none"], 1.0)
    # The same sums by the other form of log-probabilities of prompts.
    total = letters = 0
    with open("choice.jsonl") as f:
        for line in f:
            doc = json.loads(line)
            text = doc["prompt"] + doc["choices"][doc["answer"]]
            ids = [model.eot_token_id] + model.tok_encode(text)
            a = openai_client().completions.create(model="built-in", prompt=ids, max_tokens=0, extra_body={"prompt_logprobs": 0})
            total += sum(p[str(i)]["logprob"] for p, i in zip(a.choices[0].prompt_logprobs[1:], ids[1:]))
            letters += len(text.encode())
    got = found["moeserve_rolling"]["bits_per_byte,none"]
    if not math.isclose(got, -total / letters / math.log(2), rel_tol=1e-6):
        raise AssertionError(f"{got} bits a byte, want {-total / letters / math.log(2)}")


@does("lm-eval", "`generate_until` by chats (`local-chat-completions`)")
def _():
    import lm_eval
    from lm_eval.models.openai_completions import LocalChatCompletion
    from lm_eval.tasks import TaskManager

    os.chdir(os.path.join(HERE, "tasks"))
    model = LocalChatCompletion(model="built-in", base_url=AT + "/v1/chat/completions", max_length=256, num_concurrent=2, auth_token=KEY)
    found = lm_eval.simple_evaluate(model=model, tasks=["moeserve_generate"], apply_chat_template=True,
                                    task_manager=TaskManager(include_path=os.path.join(HERE, "tasks"), include_defaults=False))["results"]
    equal(found["moeserve_generate"]["exact_match,none"], 1.0)


# --- programs with their own environments

def program(client, *command, env=None):
    """Runs a program of CLIENTS, where make clients has installed it."""
    path = os.path.join(PROGRAMS, client)
    if not os.path.isdir(path):
        raise AssertionError(f"{path} is not there: run make clients")
    r = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=600, env={**os.environ, "AT": AT, "KEY": KEY, **(env or {})})
    if r.returncode != 0:
        raise AssertionError(f"{command[0]} ends with {r.returncode}: {r.stdout[-3000:]} {r.stderr[-3000:]}")
    return r.stdout


for mode, what in {
    "TOOLS": "`TOOLS`: the call that it names, by the schema, also while it is streamed", "TOOLS_STRICT": "`TOOLS_STRICT`", "JSON_SCHEMA": "`JSON_SCHEMA`",
}.items():
    does("instructor", what)(lambda mode=mode: program("instructor", "bin/python", os.path.join(HERE, "instructor_check.py"), mode))


@does("guidellm", "benchmarks of completions, chats and responses, streamed")
def _():
    tokenizer = os.path.join(FIXTURES, "qwen3_moe")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        with tempfile.TemporaryDirectory() as dir:
            out = os.path.join(dir, "out.json")
            program(
                "guidellm", "bin/guidellm", "run", "--backend", f"kind=openai_http,target={TOOLS},model=with-tools,api_key={KEY},request_format={path}",
                "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
                "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
                "--output", f"kind=json,path={out}", "--disable-progress",
            )
            with open(out) as f:
                b = json.load(f)["benchmarks"][0]
        equal((path, b["scheduler_metrics"]["requests_made"]), (path, {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}))


@does("aiperf", "benchmarks of completions, chats, responses and messages, streamed, on the built-in model")
def _():
    tokenizer = os.path.join(ROOT, "models", "tiny", "checkpoint")
    for kind in ("completions", "chat", "responses", "messages"):
        with tempfile.TemporaryDirectory() as dir:
            program(
                "aiperf", "bin/aiperf", "profile", "--model", "built-in", "--url", AT, "--api-key", KEY, "--endpoint-type", kind, "--streaming",
                "--tokenizer", tokenizer, "--request-count", "6", "--concurrency", "2", "--num-dataset-entries", "6",
                "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--random-seed", "1", "--workers-max", "2", "--ui", "none", "--artifact-dir", dir,
                # aiperf leaves files behind. With HF_HUB_OFFLINE it takes the path of a tokenizer for a repository's name.
                env={"TMPDIR": dir, "HF_HUB_OFFLINE": ""},
            )
            with open(os.path.join(dir, "profile_export_aiperf.json")) as f:
                b = json.load(f)
        equal((kind, b["request_count"]["avg"], b["error_summary"], b["time_to_first_token"]["count"]), (kind, 6.0, [], 6))


# Names of checks of check.mjs.
for client, what, name, refused in (
    ("openai (npm)", "chat, stream, completions, responses, streamed too", "openai", ""),
    ("openai (npm)", "`parse` with a schema of zod, of chats and of responses", "openai parse", ""),
    ("openai (npm)", "tools: the call that `tool_choice` requires, streamed too, and the answer to its result; `runTools`", "openai tools", ""),
    ("openai (npm)", "embeddings", "openai embeddings", "does not do embeddings"),
    ("@anthropic-ai/sdk (npm)", "messages, streamed too, count_tokens", "anthropic", ""),
    ("@anthropic-ai/sdk (npm)", "tools: `tool_use`, streamed too, and `tool_result`", "anthropic tools", ""),
    ("ai (npm)", "`generateText`, `streamText`: by the providers `openai-compatible`, `openai` (responses) and `anthropic`", "ai", ""),
    ("ai (npm)", "`generateObject`, `Output.object`", "ai objects", ""),
    ("ai (npm)", "tools: the call that `toolChoice` requires is run and its result answered: by each of these providers", "ai tools", ""),
):
    does(client, what, refused)(lambda name=name: program("js", "node", "check.mjs", name))


# The tests of tests/openai, each with a server of its own.
GO = {
    "openai-go": ("github.com/openai/openai-go/v3", {
        "chat, whole and streamed; completions; `responses`, streamed too; models": "TestModels|TestChat|TestChatStream|TestCompletions|TestResponses",
        "function tools in chats and responses": "TestTools|TestResponsesTools",
        "`response_format` with a schema": "TestResponseFormat",
        "errors as its own type": "TestErrors",
    }),
    "anthropic-sdk-go": ("github.com/anthropics/anthropic-sdk-go", {
        "messages, streamed too, count_tokens": "TestMessages",
        "tools: `tool_use` and `tool_result`": "TestMessagesTools",
    }),
}


def go_tests(names):
    r = subprocess.run(["go", "test", "-count=1", "-v", "-run", f"^({names})$", "."], cwd=os.path.join(ROOT, "tests", "openai"), capture_output=True, text=True, timeout=600)
    if r.returncode != 0:
        raise AssertionError(f"{r.stdout[-3000:]} {r.stderr[-3000:]}")
    equal(set(re.findall(r"^--- PASS: (\w+)", r.stdout, re.MULTILINE)), set(names.split("|")))


for client, (_, what) in GO.items():
    for does_what, names in what.items():
        does(client, does_what)(lambda names=names: go_tests(names))


def version(client):
    if client in GO:
        with open(os.path.join(ROOT, "tests", "openai", "go.mod")) as f:
            return re.search(re.escape(GO[client][0]) + r" v(\S+)", f.read())[1]
    name = client.removesuffix(" (npm)")
    if name != client:
        with open(os.path.join(PROGRAMS, "js", "node_modules", name, "package.json")) as f:
            return json.load(f)["version"]
    if os.path.isdir(site := os.path.join(PROGRAMS, client, "lib")):
        found = importlib.metadata.distributions(path=glob.glob(os.path.join(site, "*", "site-packages")))
        return next(d.version for d in found if d.name == client)
    return importlib.metadata.version({"pydantic-ai": "pydantic-ai-slim", "lm-eval": "lm_eval"}.get(name, name))


def run(only):
    """Runs the checks and returns the rows of the page."""
    if unknown := set(only) - {c[0] for c in CHECKS}:
        raise SystemExit(f"no client {', '.join(sorted(unknown))}: there are {', '.join(dict.fromkeys(c[0] for c in CHECKS))}")
    rows, failed = {}, []
    for client, what, refused, f in CHECKS:
        if only and client not in only:
            continue
        row = rows.setdefault(client, ([], []))
        try:
            f()
            if refused:
                failed.append(f"{client}: {what} works, and was expected to be refused")
            row[0].append(what)
            print(f"{client}: {what}: works")
        except Exception as e:
            told = f"{e} {e.__cause__ or ''}"
            if not refused or refused not in told:
                failed.append(f"{client}: {what}: {type(e).__name__}: {told[-3000:]}\n{''.join(traceback.format_tb(e.__traceback__)[-3:])}")
                print(f"{client}: {what}: FAILS")
                continue
            row[1].append(what)
            print(f"{client}: {what}: refused")
    if failed:
        raise SystemExit("\n".join(failed) + f"\n{len(failed)} checks fail")
    return rows


def page(rows, before):
    """The page with these rows; clients that were not run keep theirs of the page before."""
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines() if line.startswith("| ")}
    lines = [
        "# Clients", "",
        "*For those who use moeserve from client software of others: what was tried, at which version.*", "",
        "<!-- Generated: make clients -->", "",
        "Each was run against `moeserve serve` with the built-in model, which knows a few tasks and tools by heart, or with models of random weights. What is refused is an error that names it.", "",
        "| client | version | works | refused |", "|---|---|---|---|",
    ]
    for client in dict.fromkeys(c[0] for c in CHECKS):
        if client in rows:
            works, refused = rows[client]
            lines.append(f"| {client} | {version(client)} | {'; '.join(works)} | {'; '.join(refused)} |")
        elif client in kept:
            lines.append(kept[client])
    return "\n".join(lines) + "\n"


class Server:
    """A server with these arguments."""

    def __init__(self, dir, *args):
        self.args, self.dir = args, dir

    def __enter__(self):
        command = [os.path.abspath(sys.argv[1]), "serve", "--port", "0", *self.args]
        self.process = subprocess.Popen(command, cwd=self.dir, env={**os.environ, "MOESERVE_API_KEY": KEY}, stderr=subprocess.PIPE, text=True)
        late = threading.Timer(60, self.process.kill)
        late.start()
        log = []
        for line in self.process.stderr:
            log.append(line)
            if found := re.search(r"msg=serving .*address=(http://\S+)", line):
                late.cancel()
                threading.Thread(target=self.process.stderr.read, daemon=True).start()  # the pipe must not fill up
                return found[1]
        raise SystemExit("moeserve did not serve: " + "".join(log))

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        equal(self.process.wait(60), 0)


def main():
    global AT, TOOLS
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    to = os.path.abspath(sys.argv[2])
    with tempfile.TemporaryDirectory() as dir:
        model = os.path.join(dir, "with-tools")
        shutil.copytree(os.path.join(FIXTURES, "qwen3_moe"), model)
        shutil.copy(os.path.join(ROOT, "tests", "openai", "testdata", "tools.jinja"), os.path.join(model, "chat_template.jinja"))
        with Server(dir) as AT, Server(dir, "--model", model) as TOOLS:
            rows = run(sys.argv[3:])
    before = ""
    if sys.argv[3:] and os.path.exists(to):
        with open(to) as f:
            before = f.read()
    with open(to, "w") as f:
        f.write(page(rows, before))


main()
