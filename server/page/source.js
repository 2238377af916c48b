// Requests to the server, with the key that the user gave, and its stream of events.

const keyName = "moeserve-key";

// NeedsKey: the server refuses requests without a key, or with the one that is kept.
export class NeedsKey extends Error {}

export function setKey(key) {
  sessionStorage.setItem(keyName, key);
}

async function request(path, init = {}) {
  const headers = { ...(init.headers ?? {}) };
  const key = sessionStorage.getItem(keyName);
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...init, headers });
  if (answer.status === 401) throw new NeedsKey("the server needs an API key");
  if (!answer.ok) {
    let text = await answer.text();
    try {
      text = JSON.parse(text).error.message;
    } catch {
      // not JSON: the text says it
    }
    throw new Error(text || `${path}: status ${answer.status}`);
  }
  return answer;
}

// get returns the JSON at a path.
export async function get(path) {
  return (await request(path)).json();
}

// histograms returns those of a model that have these names in /metrics: pairs of a bound and how many are up to it.
export async function histograms(model, names) {
  const all = Object.fromEntries(names.map((n) => [n, []]));
  for (const line of (await (await request("/metrics")).text()).split("\n")) {
    const found = line.match(/^([\w:]+)_bucket\{(.*)\} (\S+)$/);
    if (!found || !all[found[1]] || !found[2].includes(`model_name=${JSON.stringify(model)}`)) continue;
    const bound = found[2].match(/le="([^"]+)"/)[1];
    all[found[1]].push([bound === "+Inf" ? Infinity : Number(bound), Number(found[3])]);
  }
  return all;
}

// lines calls each with the data of every server-sent event of a response, until it ends.
async function lines(answer, each) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const line of parts) {
      if (line.startsWith("data: ")) each(line.slice(6));
    }
  }
}

// follow calls each with every event, and again after a second where the stream ends.
export async function follow(each, state) {
  for (;;) {
    try {
      const answer = await request("/debug/events");
      state(true);
      await lines(answer, (data) => each(JSON.parse(data)));
    } catch (error) {
      if (error instanceof NeedsKey) return;
    }
    state(false);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

// complete runs a prompt, and calls each with the chunks of its completion.
export async function complete(prompt, tokens, each) {
  const answer = await request("/v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ prompt, max_tokens: tokens, temperature: 0, stream: true, return_token_ids: true }),
  });
  await lines(answer, (data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    each(chunk);
  });
}
