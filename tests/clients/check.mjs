// Checks of client software in JavaScript: node check.mjs CHECK. AT is the address of a server with the built-in
// model, KEY its key. See check.py.
import assert from "node:assert/strict";

const { AT, KEY } = process.env;
const BALL = "Ann gave the red ball to Ben. Who has the ball?";
const BALL_IS = "Ben has the red ball.";
const SCHEMA = { type: "object", properties: { owner: { enum: ["Ann", "Ben"] } }, required: ["owner"], additionalProperties: false };
const user = (content) => [{ role: "user", content }];

async function texts(stream, text) {
  let all = "";
  for await (const one of stream) all += text(one) ?? "";
  return all;
}

function isOwner(object) {
  assert.deepEqual(Object.keys(object), ["owner"]);
  assert.ok(["Ann", "Ben"].includes(object.owner), object.owner);
}

async function owner() {
  const { z } = await import("zod");
  return z.object({ owner: z.enum(["Ann", "Ben"]) });
}

async function openai() {
  const { default: OpenAI } = await import("openai");
  return new OpenAI({ baseURL: AT + "/v1", apiKey: KEY, maxRetries: 0 });
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  return new Anthropic({ baseURL: AT, apiKey: KEY, maxRetries: 0 });
}

// A model of the Vercel AI SDK by each provider.
async function vercel() {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  const api = { baseURL: AT + "/v1", apiKey: KEY };
  return [
    createOpenAICompatible({ name: "moeserve", supportsStructuredOutputs: true, includeUsage: true, ...api })("built-in"),
    createOpenAI(api).responses("built-in"),
    createAnthropic(api)("built-in"),
  ];
}

const checks = {
  async openai() {
    const c = await openai();
    const chat = { model: "built-in", messages: user(BALL), temperature: 0 };
    const a = await c.chat.completions.create(chat);
    assert.equal(a.choices[0].message.content, BALL_IS);
    assert.equal(await texts(await c.chat.completions.create({ ...chat, stream: true }), (x) => x.choices[0]?.delta.content), BALL_IS);
    const second = await c.chat.completions.create({ ...chat, messages: [...chat.messages, a.choices[0].message, ...user("1+2=")] });
    assert.equal(second.choices[0].message.content, "3");
    assert.equal((await c.completions.create({ model: "built-in", prompt: "1+2=", temperature: 0 })).choices[0].text, "3");
    const ask = { model: "built-in", input: BALL, temperature: 0 };
    const r = await c.responses.create(ask);
    assert.equal(r.output_text, BALL_IS);
    assert.equal(await texts(await c.responses.create({ ...ask, stream: true }), (x) => (x.type === "response.output_text.delta" ? x.delta : "")), BALL_IS);
    assert.equal((await c.responses.stream(ask).finalResponse()).output_text, BALL_IS);
    assert.equal((await c.responses.create({ ...ask, input: [...user(BALL), ...r.output, ...user("1+2=")] })).output_text, "3");
  },
  async "openai parse"() {
    const c = await openai();
    const { zodResponseFormat, zodTextFormat } = await import("openai/helpers/zod");
    const a = await c.chat.completions.parse({ model: "built-in", messages: user(BALL), response_format: zodResponseFormat(await owner(), "owner") });
    isOwner(a.choices[0].message.parsed);
    const second = await c.chat.completions.create({ model: "built-in", messages: [...user(BALL), a.choices[0].message, ...user("1+2=")], temperature: 0 });
    assert.equal(second.choices[0].message.role, "assistant");
    isOwner((await c.responses.parse({ model: "built-in", input: BALL, text: { format: zodTextFormat(await owner(), "owner") } })).output_parsed);
  },
  async "openai tools"() {
    const c = await openai();
    const called = [];
    const give = { type: "function", function: { name: "give", parameters: SCHEMA, parse: JSON.parse, function: (o) => (called.push(o), BALL) } };
    const { parse: _, function: __, ...sent } = give.function;
    const ask = { model: "built-in", messages: user("Hi"), temperature: 0, max_tokens: 64 };
    const required = { ...ask, tools: [{ type: "function", function: sent }], tool_choice: "required" };
    const whole = await c.chat.completions.create(required);
    const streamed = await c.chat.completions.stream(required).finalChatCompletion();
    for (const { message, finish_reason } of [whole.choices[0], streamed.choices[0]]) {
      assert.equal(finish_reason, "tool_calls");
      isOwner(JSON.parse(message.tool_calls[0].function.arguments));
      const messages = [...ask.messages, message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: BALL }];
      assert.equal((await c.chat.completions.create({ ...ask, messages })).choices[0].message.content, BALL_IS);
    }
    // A tool that is named is called once.
    const run = c.chat.completions.runTools({ ...ask, tools: [give], tool_choice: { type: "function", function: { name: "give" } } });
    assert.equal(await run.finalFunctionToolCallResult(), BALL);
    assert.equal(called.length, 1);
    isOwner(called[0]);
  },
  async "openai embeddings"() {
    await (await openai()).embeddings.create({ model: "built-in", input: "x" });
  },
  async anthropic() {
    const c = await anthropic();
    const ask = { model: "built-in", max_tokens: 32, messages: user(BALL), temperature: 0 };
    const m = await c.messages.create(ask);
    assert.deepEqual([m.content[0].text, m.stop_reason], [BALL_IS, "end_turn"]);
    const final = await c.messages.stream(ask).finalMessage();
    assert.deepEqual([final.content[0].text, final.usage], [BALL_IS, { ...m.usage, input_tokens: final.usage.input_tokens, cache_read_input_tokens: final.usage.cache_read_input_tokens }]);
    assert.equal((await c.messages.countTokens({ model: "built-in", messages: user(BALL) })).input_tokens, 15);
    const second = await c.messages.create({ ...ask, messages: [...user(BALL), { role: m.role, content: m.content }, ...user("1+2=")] });
    assert.equal(second.content[0].text, "3");
    await assert.rejects(c.messages.create({ ...ask, temperature: -1 }), { status: 400 });
  },
  async "anthropic tools"() {
    const c = await anthropic();
    const ask = { model: "built-in", max_tokens: 64, messages: user("Hi"), temperature: 0 };
    const required = { ...ask, tools: [{ name: "give", input_schema: SCHEMA }], tool_choice: { type: "any" } };
    for (const m of [await c.messages.create(required), await c.messages.stream(required).finalMessage()]) {
      assert.equal(m.stop_reason, "tool_use");
      const use = m.content.find((x) => x.type === "tool_use");
      isOwner(use.input);
      const messages = [...ask.messages, { role: m.role, content: m.content }, { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: BALL }] }];
      assert.equal((await c.messages.create({ ...ask, messages })).content[0].text, BALL_IS);
    }
  },
  async ai() {
    const { generateText, streamText } = await import("ai");
    for (const model of await vercel()) {
      const ask = { model, prompt: BALL, temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
      const { text, usage } = await generateText(ask);
      assert.deepEqual([model.provider, text, usage.inputTokens], [model.provider, BALL_IS, 15]);
      const s = streamText(ask);
      assert.deepEqual([model.provider, await texts(s.textStream, (x) => x), (await s.usage).inputTokens], [model.provider, BALL_IS, 15]);
    }
  },
  async "ai objects"() {
    const { generateObject, generateText, Output } = await import("ai");
    const schema = await owner();
    for (const model of await vercel()) { // by messages, objects are arguments of a call
      const ask = { model, prompt: BALL, maxOutputTokens: 64, maxRetries: 0 };
      isOwner((await generateObject({ ...ask, schema })).object);
      isOwner((await generateText({ ...ask, output: Output.object({ schema }) })).output);
    }
  },
  async "ai tools"() {
    const { generateText, stepCountIs, tool } = await import("ai");
    for (const model of await vercel()) {
      const called = [];
      const give = tool({ inputSchema: await owner(), execute: (o) => (called.push(o), BALL) });
      const { text } = await generateText({
        model, prompt: "Hi", tools: { give }, temperature: 0, maxOutputTokens: 64, maxRetries: 0, stopWhen: stepCountIs(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
      });
      assert.deepEqual([model.provider, text, called.length], [model.provider, BALL_IS, 1]);
      isOwner(called[0]);
    }
  },
};

await checks[process.argv[2]]();
