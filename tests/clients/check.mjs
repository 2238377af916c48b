// Checks of client software in JavaScript: node check.mjs PACKAGE. AT is the address of a server with the
// built-in model, KEY its key. See check.py.
import assert from "node:assert/strict";

const { AT, KEY } = process.env;
const BALL = "Ann gave the red ball to Ben. Who has the ball?";
const BALL_IS = "Ben has the red ball.";
const user = (content) => [{ role: "user", content }];

async function texts(stream, text) {
  let all = "";
  for await (const one of stream) all += text(one) ?? "";
  return all;
}

async function vercel() {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  return createOpenAICompatible({ name: "moeserve", baseURL: AT + "/v1", apiKey: KEY, supportsStructuredOutputs: true })("built-in");
}

const checks = {
  async "openai (npm)"() {
    const { default: OpenAI } = await import("openai");
    const c = new OpenAI({ baseURL: AT + "/v1", apiKey: KEY, maxRetries: 0 });
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
  async "@anthropic-ai/sdk (npm)"() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const c = new Anthropic({ baseURL: AT, apiKey: KEY, maxRetries: 0 });
    const ask = { model: "built-in", max_tokens: 32, messages: user(BALL), temperature: 0 };
    const m = await c.messages.create(ask);
    assert.deepEqual([m.content[0].text, m.stop_reason], [BALL_IS, "end_turn"]);
    const final = await c.messages.stream(ask).finalMessage();
    assert.deepEqual([final.content[0].text, final.usage], [BALL_IS, { ...m.usage, input_tokens: final.usage.input_tokens, cache_read_input_tokens: final.usage.cache_read_input_tokens }]);
    assert.equal((await c.messages.countTokens({ model: "built-in", messages: user(BALL) })).input_tokens, 15);
    const second = await c.messages.create({ ...ask, messages: [...user(BALL), { role: m.role, content: m.content }, ...user("1+2=")] });
    assert.equal(second.content[0].text, "3");
    await assert.rejects(c.messages.create({ ...ask, temperature: -1 }), Anthropic.BadRequestError);
  },
  async "ai (npm)"() {
    const { generateText, streamText } = await import("ai");
    const model = await vercel();
    assert.equal((await generateText({ model, prompt: BALL, temperature: 0, maxRetries: 0 })).text, BALL_IS);
    assert.equal(await texts(streamText({ model, prompt: BALL, temperature: 0, maxRetries: 0 }).textStream, (x) => x), BALL_IS);
  },
  async generateObject() {
    const { generateObject } = await import("ai");
    const { z } = await import("zod");
    const { object } = await generateObject({ model: await vercel(), schema: z.object({ owner: z.enum(["Ann", "Ben"]) }), prompt: BALL, maxRetries: 0 });
    assert.ok(["Ann", "Ben"].includes(object.owner));
  },
};

await checks[process.argv[2]]();
