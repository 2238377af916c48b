// The page asks the node once a second what it is doing, follows its events, and hands both to the views.

import { NeedsKey, complete, follow, get, histograms, setKey } from "./source.js";
import * as views from "./views.js";

const $ = (id) => document.getElementById(id);
const grid = new views.Grid();
const load = new views.Load();
const peers = new views.Peers();
const steps = new views.Steps();
const timeline = new views.Timeline();
const latencies = ["vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds"];
let before; // the last answer of /debug/node
let minute = []; // histograms and links of the last minute
let drawn = 0; // steps that the chart shows
let seen = 0; // steps that have come
let following = false;

function rates(now) {
  const passed = before ? (Date.parse(now.time) - Date.parse(before.time)) / 1e3 : 0;
  const per = (key) => (passed > 0 ? Math.max(0, now[key] - before[key]) / passed : 0);
  const links = new Map();
  for (const l of now.links) {
    const was = before?.links.find((b) => b.src === l.src && b.dst === l.dst);
    const since = (key) => Math.max(0, l[key] - (was?.[key] ?? 0)) / passed;
    if (passed > 0) links.set(`${l.src} ${l.dst}`, { rate: since("bytes"), busy: since("busy_seconds") });
  }
  const [hits, misses] = [per("expert_hits"), per("expert_misses")];
  return { generated: per("generated_tokens"), prefill: per("prefill_tokens"), steps: per("steps"), hits, misses, links };
}

// latency is TTFT, TPOT and ITL of the last minute, each its median and 99th percentile, in seconds.
async function latency(node) {
  const now = { at: Date.now(), all: await histograms(node.model, latencies), links: node.now.links };
  minute = [...minute.filter((m) => now.at - m.at <= 60e3), now];
  return latencies.map((name) => [0.5, 0.99].map((q) => views.quantile(now.all[name], minute[0].all[name], q)));
}

async function update() {
  const [node, residency] = await Promise.all([get("/debug/node"), get("/debug/residency")]);
  const r = rates(node.now);
  views.header(node, (Date.parse(node.now.time) - Date.parse(node.since)) / 1e3);
  load.add(views.reading(Date.now() / 1e3, node.now, residency, load.samples.at(-1)));
  views.now(node.now, r, residency.kv, await latency(node), load);
  load.draw();
  views.memory(node.now.memories, residency.peers);
  views.links(node.now.links, r.links, minute.map((m) => m.links));
  views.kv(residency.kv);
  grid.update(residency.experts.layers);
  peers.update(residency.harvest, residency.peers);
  if (seen !== drawn) {
    steps.draw();
    timeline.draw();
    drawn = seen;
  }
  before = node.now;
  if (node.now.failing) views.state(`A step fails: ${node.now.failing}`, true);
  else if (node.now.sleep_level) views.state("Asleep", false);
  else views.state(node.now.running ? "Running" : "Idle", false);
}

const running = []; // of a prompt: steps that have come since it was sent
let collecting = false;

function event(e) {
  if (e.event === "engine.step") {
    seen++;
    steps.add(e);
    timeline.add(e);
    if (collecting && e.sampled) running.push(e);
    return;
  }
  if (e.event !== "harvest.allocated" && e.event !== "harvest.freed") views.happened(e);
}

async function loop() {
  for (;;) {
    try {
      await update();
      $("key").hidden = true;
      if (!following) {
        following = true;
        follow(event, () => {}).then(() => (following = false));
      }
    } catch (error) {
      before = undefined;
      minute = [];
      if (error instanceof NeedsKey) {
        $("key").hidden = false;
        views.state("The server needs an API key", true);
      } else {
        views.state(`No answer: ${error.message}`, true);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, document.hidden ? 5000 : 1000));
  }
}

$("key").addEventListener("submit", (e) => {
  e.preventDefault();
  setKey($("key-text").value);
  $("key-text").value = "";
});

addEventListener("resize", () => timeline.draw());

const dark = matchMedia("(prefers-color-scheme: dark)");
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", name === "dark");
}
theme(localStorage.getItem("moeserve-theme") ?? (dark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("moeserve-theme", name);
  theme(name);
});

$("prompt").addEventListener("submit", async (e) => {
  e.preventDefault();
  const button = $("prompt").querySelector("button");
  button.disabled = true;
  running.length = 0;
  collecting = true;
  const all = [];
  const show = () => views.tokens(all.map((text, i) => ({ text, step: running[i] })));
  try {
    $("prompt-state").textContent = "Running";
    await complete($("prompt-text").value, Number($("prompt-tokens").value), (chunk) => {
      const choice = chunk.choices?.[0];
      const count = choice?.token_ids?.length ?? (choice?.text ? 1 : 0);
      for (let i = 0; i < count; i++) all.push(i ? "" : choice.text);
    });
    for (let i = 0; i < 20 && running.length < all.length; i++) await new Promise((resolve) => setTimeout(resolve, 50));
    show();
    $("prompt-state").textContent = `${all.length} tokens`;
  } catch (error) {
    $("prompt-state").textContent = error.message;
  } finally {
    collecting = false;
    button.disabled = false;
  }
});

loop();
