// Views draw the sections of the page. Texts of the server are put in as text.

const svgSpace = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

// element makes an element with attributes and children; texts become text nodes.
export function element(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) e.setAttribute(key, value);
  e.append(...children);
  return e;
}

function shape(name, attributes = {}, ...children) {
  const e = document.createElementNS(svgSpace, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}

const formats = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits })); // a large grid needs thousands of numbers

export const number = (x, digits = 1) => formats[digits].format(x);

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// short is a number where there is little room.
const short = (n) => (n < 1e5 ? number(n, 0) : compact.format(n));

// count is a number of things.
const count = (n, one, more = `${one}s`) => `${number(n)} ${n === 1 ? one : more}`;

// bytes as people read them.
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${number(n, n < 10 ? 2 : 1)} ${units[i]}`;
}

const seconds = (s) => (s < 1 ? `${number(s * 1e3, s < 0.01 ? 2 : s < 0.1 ? 1 : 0)} ms` : `${number(s, 1)} s`);

function span(s) {
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${number(s / 3600, 1)} h`;
}

// rows puts rows into a table's body: each is a list of cells, the first of which heads it.
function rows(id, all, empty) {
  const body = $(id).tBodies[0];
  const columns = $(id).tHead.rows[0].cells;
  body.replaceChildren(
    ...all.map((cells) =>
      element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", { scope: i ? undefined : "row", class: columns[i].className || undefined }, cell ?? "–"))),
    ),
  );
  if (!all.length) body.append(element("tr", {}, element("td", { colspan: columns.length, class: "quiet" }, empty)));
}

// swatch is a mark of a color.
function swatch(color) {
  const i = element("i");
  i.style.background = color;
  return i;
}

// purposes are what links copy for, as the server names it and as the page does.
const purposes = [
  ["demand", "demand"],
  ["prefetch", "prefetch"],
  ["migration", "migration"],
  ["kv-load", "KV loads"],
  ["kv-store", "KV stores"],
];

// byPurpose lists what bytes were for: of each purpose its key, its name and its bytes, less those before.
export function byPurpose(bytes = {}, before = {}) {
  const known = new Map(purposes);
  return [...known.keys(), ...Object.keys(bytes).filter((k) => !known.has(k))]
    .map((key) => [key, known.get(key) ?? key, (bytes[key] ?? 0) - (before[key] ?? 0)])
    .filter(([, , n]) => n > 0);
}

// split shows what bytes were for, as a bar and in words; a mark of the color is before each word.
function split(all) {
  const total = all.reduce((t, [, , n]) => t + n, 0);
  if (!total) return "–";
  const percent = (n) => `${n < total / 100 ? "<1" : number((100 * n) / total, 0)} %`;
  const parts = all.map(([key, , n]) => {
    const part = element("i", { "data-purpose": key });
    part.style.flexGrow = n;
    return part;
  });
  const said = all.map(([, name, n]) => `${name} ${percent(n)} (${bytes(n)})`).join(", ");
  const words = all.flatMap(([key, name, n]) => [element("span", {}, element("i", { "data-purpose": key }), `${name} ${percent(n)}`), " "]);
  return element("div", { class: "split", title: said }, element("div", { class: "bar", role: "img", "aria-label": said }, ...parts), element("p", { "aria-hidden": "true" }, ...words));
}

// bar shows shares from 0 to 1, one after the other, which the cells beside it say in numbers.
function bar(...shares) {
  const parts = shares.map((share) => {
    const part = element("i");
    part.style.width = `${Math.min(1, Math.max(0, share)) * 100}%`;
    return part;
  });
  return element("div", { class: "bar", role: "img", "aria-label": shares.map((s) => `${number(100 * s)} %`).join(", ") }, ...parts);
}

// quantile of what a histogram has counted since before, linear within its buckets as PromQL has it; undefined: nothing.
export function quantile(histogram, before, q) {
  const counts = histogram.map(([bound, n], i) => [bound, n - (before[i]?.[1] ?? 0)]);
  const wanted = q * (counts.at(-1)?.[1] ?? 0);
  if (!(wanted > 0)) return undefined;
  const i = counts.findIndex(([, n]) => n >= wanted);
  const [from, below] = i ? counts[i - 1] : [0, 0];
  const [to, n] = counts[i];
  return to === Infinity ? from : from + ((to - from) * (wanted - below)) / (n - below);
}

// header shows which model and server this is.
export function header(node, uptime) {
  $("model").textContent = node.model;
  const emulated = node.now.device === "emulated";
  $("device").textContent = emulated ? "CPU, emulated GPU" : node.now.device;
  $("device").className = emulated ? "bad" : "quiet";
  $("about").textContent = `moeserve ${node.version} · context ${number(node.max_model_len)} tokens · up ${span(uptime)}`;
  document.title = `${node.model} · moeserve`;
}

// state shows what the server does in a word.
export function state(text, bad) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").toggleAttribute("data-bad", bad);
}

// now shows the figures of the moment; rates are those since the last call, latencies those of the last minute.
export function now(n, rates, kv, [ttft, tpot, itl], load) {
  const [hits, misses] = rates.hits + rates.misses ? [rates.hits, rates.misses] : [n.expert_hits, n.expert_misses];
  const ms = (all) => (all[0] === undefined ? "–" : all.map((s) => number(s * 1e3, s < 0.01 ? 1 : 0)).join(" / "));
  const all = [
    ["Generated", number(rates.generated), "tok/s"],
    ["Prompts", number(rates.prefill), "tok/s"],
    ["Running", number(n.running), "sequences"],
    ["Waiting", number(n.waiting), "sequences"],
    ["TTFT, median / p99", ms(ttft), "ms"],
    ["TPOT, median / p99", ms(tpot), "ms"],
    ["ITL, median / p99", ms(itl), "ms"],
    ["KV cache", kv.blocks ? number((100 * kv.used_blocks) / kv.blocks) : "–", "%"],
    ["KV cache tokens", short(kv.used_blocks * kv.block_tokens), `of ${short(kv.blocks * kv.block_tokens)}`],
    ["Steps", number(rates.steps), "per s"],
    ["Experts offloaded", number(100 * n.offload_fraction), "%"],
    ["Expert hits", hits + misses ? number((100 * hits) / (hits + misses)) : "–", "%"],
    ["Prefix cache hits", n.prefix_cache_queries ? number((100 * n.prefix_cache_hits) / n.prefix_cache_queries) : "–", "%"],
    ["Preemptions, last min", number(load.preempted(60)), `of ${number(n.preemptions)} in all`],
    ...(load.borrows() ? [["Revocations, last min", number(total(load.revoked(60))), `of ${number(total(load.samples.at(-1).revocations))} in all`]] : []),
  ];
  $("now").replaceChildren(
    ...all.map(([what, value, unit]) => element("div", {}, element("dt", {}, what), element("dd", {}, element("span", {}, value), " ", element("small", {}, unit)))),
  );
}

// memory shows the spaces, and what their memory is for: of peers all of it, of others what is not small.
export function memory(memories, peers) {
  rows(
    "memory",
    memories.flatMap((m) => {
      const share = (n) => (m.capacity_bytes ? n / m.capacity_bytes : 0);
      const all = m.parts ?? [];
      const lends = peers.some((p) => p.device === m.space);
      const large = all.filter((p) => lends || p.bytes >= m.allocated_bytes / 100);
      const small = all.reduce((n, p) => n + p.bytes, 0) - large.reduce((n, p) => n + p.bytes, 0);
      if (small) large.push({ name: "other buffers", bytes: small });
      return [
        [m.space, bar(share(m.allocated_bytes), share(m.other_processes_bytes)), bytes(m.allocated_bytes), bytes(m.other_processes_bytes), m.capacity_bytes ? bytes(m.capacity_bytes) : "–"],
        ...large.map((p) => [element("span", { class: "part" }, p.name), bar(share(p.bytes)), bytes(p.bytes), "", ""]),
      ];
    }),
    "No memory is known.",
  );
}

// links shows what links copy; now has, by link, bytes per second and the share of the time with a copy under way, minute
// the readings of the last minute.
export function links(all, now, minute) {
  rows(
    "links",
    all.map((l) => {
      const { rate, busy } = now.get(`${l.src} ${l.dst}`) ?? { rate: 0, busy: 0 };
      const readings = minute.map((m) => m.find((e) => e.src === l.src && e.dst === l.dst)).filter(Boolean);
      return [
        `${l.src} → ${l.dst}`,
        percent(Math.min(busy, 1)),
        l.bytes_per_second ? bar(rate / l.bytes_per_second) : "–",
        `${number(rate / 1e9, 2)} / ${l.bytes_per_second ? number(l.bytes_per_second / 1e9) : "–"}`,
        number(l.bytes / 1e9, 2),
        `${number(l.queued)} / ${number(Math.max(l.queued, ...readings.map((e) => e.queued)))}`,
        split(byPurpose(l.bytes_by_purpose, readings.length === minute.length ? readings[0]?.bytes_by_purpose : undefined)),
      ];
    }),
    "Nothing has been copied.",
  );
}

// kv shows the KV cache and the tiers below it.
export function kv(k) {
  const gpu = ["GPU", bar(k.blocks ? k.used_blocks / k.blocks : 0), number(k.used_blocks * k.block_tokens), number(k.blocks * k.block_tokens), number(k.used_blocks), number(k.blocks), "–", "–"];
  const tiers = (k.tiers ?? []).map((t) => [
    t.medium,
    bar(t.capacity_blocks ? t.used_blocks / t.capacity_blocks : 0),
    number(t.used_blocks * t.block_tokens),
    number(t.capacity_blocks * t.block_tokens),
    number(t.used_blocks),
    number(t.capacity_blocks),
    bytes(t.stored_bytes),
    bytes(t.loaded_bytes),
  ]);
  rows("kv", [gpu, ...tiers], "");
}

const tiers = [
  ["resident", "R", "resident: in the GPU's memory"],
  ["cached", "C", "cached: in the GPU's expert cache"],
  ["peer", "P", "peer: in another GPU's memory"],
  ["host", "H", "host: in host memory"],
];
const letter = Object.fromEntries(tiers.map(([name, l]) => [name, l]));

// Shades of a cell, by the tokens of its expert beside the mean of its layer.
const shades = ["none", "less than half of the layer's mean", "about the mean", "over 1.5 times the mean"];

// shade is the one of an expert that has this many tokens, and its layer's experts this many on the mean.
export function shade(tokens, mean) {
  if (!(tokens > 0)) return 0;
  return tokens < mean / 2 ? 1 : tokens <= 1.5 * mean ? 2 : 3;
}

// hitRate says how many of the uses of an expert found it in the GPU's memory.
const hitRate = (e) => (e.uses ? `, hit rate ${number((100 * e.hits) / e.uses)} %` : "");

// unused is how many prefetches of an expert were not used lately: its slot went to another one, or its layer has run
// without it. That may be a prefetch of long ago, so of an expert that has not been fetched lately there are none. wasted: so
// many that it matters.
export const unused = (e, lately) => Math.min(lately.fetches, lately.unused_prefetches + (e.unused ? 1 : 0));
export const wasted = (e, lately) => unused(e, lately) > lately.fetches / 10;

const window_ = 10; // seconds, of which the grid shows the use

// Grid is the grid of experts: a row for each layer. One cell is in the order of tabs, and arrow keys move it.
export class Grid {
  constructor() {
    this.cells = [];
    this.at = [0, 0];
    this.samples = []; // what was counted at the end of each second
    $("experts-legend").replaceChildren(
      ...tiers.map(([name, l, what]) => element("li", {}, element("i", { "data-tier": name }, l), what)),
      element("li", {}, element("i", { "data-fetched": "" }), "line above: fetched since the page was last updated"),
      element("li", {}, element("i", { "data-unused": "" }), `ring: over a tenth of the fetches in the last ${window_} s were prefetches that were not used`),
    );
    $("shades-legend").replaceChildren(
      element("li", {}, `Tokens in the last ${window_} s:`),
      ...shades.map((what, i) => element("li", {}, element("i", { "data-tier": "none", "data-shade": i }), what)),
    );
    $("grid").addEventListener("pointerover", (e) => e.target.dataset.row && (e.target.title = this.say(e.target)));
    $("grid").addEventListener("keydown", (e) => this.key(e));
    $("grid").addEventListener("focusin", (e) => this.focused(e.target));
    $("grid").addEventListener("click", (e) => e.target.focus());
    $("grid-size").firstChild.addEventListener("click", (e) => this.dense(e.target.getAttribute("aria-pressed") === "true"));
  }

  // dense has all cells of a large grid in sight, without letters. Only with letters it scrolls.
  dense(on) {
    $("grid").toggleAttribute("data-dense", on);
    $("grid").parentNode.classList.toggle("whole", on || $("grid-size").hidden);
    $("grid-size").firstChild.setAttribute("aria-pressed", !on);
  }

  build(layers) {
    const experts = Math.max(...layers.map((l) => l.experts.length));
    $("grid").style.setProperty("--experts", experts);
    $("grid").setAttribute("aria-rowcount", layers.length);
    $("grid").setAttribute("aria-colcount", experts);
    const every = experts > 32 ? 8 : experts > 16 ? 4 : 1;
    const head = element("div", { role: "row" }, element("span", { role: "columnheader", "aria-label": "layer" }));
    for (let i = 0; i < experts; i++) head.append(element("span", { role: "columnheader", "aria-label": `expert ${i}` }, i % every ? "" : `${i}`));
    this.cells = layers.map((l, row) =>
      l.experts.map((_, column) => element("span", { role: "gridcell", tabindex: row || column ? -1 : 0, "data-row": row, "data-column": column })),
    );
    $("grid").replaceChildren(
      head,
      ...layers.map((l, row) => element("div", { role: "row" }, element("span", { role: "rowheader" }, `${l.layer}`), ...this.cells[row])),
    );
    this.at = [0, 0];
    const large = experts > 64 || layers.length * experts > 1024;
    $("grid-size").hidden = !large;
    this.dense(large);
  }

  // update shows where experts are.
  update(layers) {
    if (layers.length !== this.cells.length || layers.some((l, i) => l.experts.length !== this.cells[i].length)) {
      this.build(layers);
      this.samples = [];
      this.chosen = false;
    }
    const at = Date.now() / 1e3;
    this.samples = [...this.samples.filter((s) => at - s.at <= window_ + 0.5), { at, layers }];
    const before = this.samples.at(-2)?.layers, first = this.samples[0].layers;
    this.seconds = at - this.samples[0].at;
    const since = (key, e, row, column) => Math.max(0, e[key] - first[row].experts[column][key]);
    this.use = layers.map((l, row) => l.experts.map((e, column) => Object.fromEntries(["routed_tokens", "fetches", "uses", "hits", "unused_prefetches"].map((key) => [key, since(key, e, row, column)]))));
    this.means = this.use.map((all) => all.reduce((n, e) => n + e.routed_tokens, 0) / all.length);
    this.layers = layers;
    layers.forEach((l, row) =>
      l.experts.forEach((e, column) => {
        const cell = this.cells[row][column];
        if (cell.dataset.tier !== e.tier) {
          cell.dataset.tier = e.tier;
          cell.textContent = letter[e.tier] ?? e.tier[0].toUpperCase();
        }
        cell.toggleAttribute("data-moving", Boolean(e.moving));
        cell.dataset.shade = shade(this.use[row][column].routed_tokens, this.means[row]);
        cell.toggleAttribute("data-fetched", before !== undefined && e.fetches > before[row].experts[column].fetches);
        cell.toggleAttribute("data-unused", wasted(e, this.use[row][column]));
        // The label of the cell with the focus stays, as a screen reader would say it again each second.
        if (cell !== document.activeElement) cell.setAttribute("aria-label", this.say(cell));
      }),
    );
    if (this.chosen) this.describe();
  }

  // say is where the expert of a cell is, and how much it is used.
  say(cell) {
    const [row, column] = [Number(cell.dataset.row), Number(cell.dataset.column)];
    const e = this.layers[row].experts[column], used = this.use[row][column], tokens = used.routed_tokens;
    const beside = tokens ? ` (${number(tokens / this.means[row])} times the layer's mean)` : "";
    const use = this.samples.length > 1 ? ` In the last ${Math.round(this.seconds)} s ${count(tokens, "token")}${beside}, ${count(used.fetches, "fetch", "fetches")}${unused(e, used) ? `, ${count(unused(e, used), "prefetch", "prefetches")} not used` : ""}${hitRate(used)}.` : "";
    return `Layer ${this.layers[row].layer}, expert ${column}: ${e.tier}${e.peer ? ` on ${e.peer}` : ""}.${use}`;
  }

  key(e) {
    const [row, column] = this.at;
    const last = this.cells[row].length - 1;
    const to = {
      ArrowRight: [row, column + 1],
      ArrowLeft: [row, column - 1],
      ArrowDown: [row + 1, column],
      ArrowUp: [row - 1, column],
      Home: [e.ctrlKey ? 0 : row, 0],
      End: [e.ctrlKey ? this.cells.length - 1 : row, last],
      PageDown: [Math.min(row + 8, this.cells.length - 1), column],
      PageUp: [Math.max(row - 8, 0), column],
    }[e.key];
    if (!to) return;
    e.preventDefault();
    this.cells[to[0]]?.[to[1]]?.focus();
  }

  focused(cell) {
    if (cell.dataset.row === undefined) return;
    this.cells[this.at[0]][this.at[1]].tabIndex = -1;
    this.at = [Number(cell.dataset.row), Number(cell.dataset.column)];
    cell.tabIndex = 0;
    this.chosen = true;
    cell.setAttribute("aria-label", this.say(cell));
    this.describe();
  }

  describe() {
    const [row, column] = this.at;
    const e = this.layers[row].experts[column];
    $("expert").textContent =
      `${this.say(this.cells[row][column])} ${e.lent ? "It is in memory lent by the KV cache. " : ""}${e.moving ? "It is moving. " : ""}` +
      `Since the start: used by ${count(e.uses, "step")} for ${count(e.routed_tokens, "token")}, fetched ${count(e.fetches, "time")}${hitRate(e)}. ${count(e.unused_prefetches, "prefetch was", "prefetches were")} not used before another expert got the slot.`;
  }
}

// total is the sum of counts.
const total = (counts) => Object.values(counts).reduce((n, c) => n + c, 0);

// listed are counts in words, such as "external 2, pressure 1".
const listed = (counts) => Object.entries(counts).map(([name, n]) => `${name} ${number(n)}`).join(", ");

// summed adds counts by their names.
function summed(all) {
  const sum = {};
  for (const counts of all) for (const [name, n] of Object.entries(counts)) sum[name] = (sum[name] ?? 0) + n;
  return sum;
}

// reading is the load at a time: sequences, tokens of the KV cache, and counts of preemptions and of revocations by
// reason, since the start and since the reading before. Counts that fell are those of a server that started again.
export function reading(at, node, { kv, harvest }, before) {
  const revocations = harvest ? (harvest.revocations ?? {}) : undefined;
  const since = (n, was) => (before ? Math.max(0, n - (was ?? 0)) : 0);
  return {
    at,
    running: node.running,
    waiting: node.waiting,
    used: kv.used_blocks * kv.block_tokens,
    capacity: kv.blocks * kv.block_tokens,
    preemptions: node.preemptions,
    preempted: since(node.preemptions, before?.preemptions),
    revocations,
    revoked: Object.fromEntries(
      Object.entries(revocations ?? {})
        .map(([reason, n]) => [reason, since(n, before?.revocations?.[reason])])
        .filter(([, n]) => n > 0),
    ),
  };
}

// tens sums up the readings of each 10 s, the latest first: the most of what is measured, the sum of what is counted.
export function tens(samples) {
  const all = new Map();
  for (const s of samples) {
    const from = 10 * Math.floor(s.at / 10);
    all.set(from, [...(all.get(from) ?? []), s]);
  }
  const most = (of, key) => Math.max(...of.map((s) => s[key]));
  return [...all].reverse().map(([from, of]) => ({
    from,
    running: most(of, "running"),
    waiting: most(of, "waiting"),
    used: most(of, "used"),
    capacity: of.at(-1).capacity,
    preempted: of.reduce((n, s) => n + s.preempted, 0),
    revoked: summed(of.map((s) => s.revoked)),
  }));
}

// Load draws the load over time: running and waiting sequences, tokens of the KV cache, preemptions and revocations.
export class Load {
  constructor() {
    this.samples = [];
  }

  add(sample) {
    this.samples.push(sample);
    if (this.samples.length > 300) this.samples.shift();
  }

  // last are the readings of the last seconds.
  last(seconds) {
    return this.samples.filter((s) => this.samples.at(-1).at - s.at < seconds);
  }

  preempted(seconds) {
    return this.last(seconds).reduce((n, s) => n + s.preempted, 0);
  }

  revoked(seconds) {
    return summed(this.last(seconds).map((s) => s.revoked));
  }

  // borrows reports whether there is memory of peers that can be revoked.
  borrows() {
    return this.samples.at(-1)?.revocations !== undefined;
  }

  draw() {
    const now = this.samples.at(-1);
    const passed = span(now.at - this.samples[0].at);
    const most = (key) => Math.max(...this.samples.map((s) => s[key]));
    const swatch = (name) => element("i", { "data-load": name });
    const preempted = this.preempted(Infinity), revoked = this.revoked(Infinity);
    const shown = [
      this.panel(
        "Sequences",
        [swatch("running"), `${number(now.running)} running `, swatch("waiting"), `${number(now.waiting)} waiting (queue depth)`],
        `At most ${number(most("running"))} running and ${number(most("waiting"))} waiting in the last ${passed}.`,
        { areas: [["waiting", (s) => s.running + s.waiting], ["running", (s) => s.running]] },
      ),
      this.panel(
        "KV cache",
        [swatch("used"), `${number(now.used)} of ${number(now.capacity)} tokens `],
        `At most ${number(most("used"))} tokens in use in the last ${passed}.`,
        { areas: [["used", (s) => s.used]], line: (s) => s.capacity },
      ),
      this.panel("Preemptions per 10 s", [swatch("preempted"), `${number(preempted)} in this time, ${number(now.preemptions)} since the start`], "", { bars: ["preempted", (s) => s.preempted] }),
    ];
    if (this.borrows()) {
      const reasons = total(revoked) ? ` (${listed(revoked)})` : "";
      const said = `${number(total(revoked))} in this time${reasons}, ${number(total(now.revocations))} since the start`;
      shown.push(this.panel("Revocations of peer memory per 10 s", [swatch("revoked"), said], "", { bars: ["revoked", (s) => total(s.revoked)] }));
    }
    $("load").replaceChildren(...shown);
    $("load-span").textContent = `The last ${passed}, from left to right.`;
    rows(
      "load-table",
      tens(this.samples).map((s) => [
        new Date(s.from * 1e3).toLocaleTimeString("en-GB"),
        number(s.running),
        number(s.waiting),
        `${number(s.used)} of ${number(s.capacity)}`,
        number(s.preempted),
        this.borrows() ? listed(s.revoked) || "0" : "–",
      ]),
      "",
    );
  }

  // panel is a chart with its heading: areas of which later ones are drawn over earlier ones and a line, of readings; or bars, of each 10 s.
  panel(title, said, more, { areas = [], bars, line }) {
    const w = 300, h = 90, left = 48, top = 6, bottom = h - 6;
    const from = this.samples[0].at, length = Math.max(30, this.samples.at(-1).at - from);
    const values = [...areas.map(([, value]) => value), ...(line ? [line] : [])].flatMap((value) => this.samples.map(value));
    const counted = bars ? tens(this.samples).filter((s) => bars[1](s) > 0) : [];
    const highest = Math.max(1, ...values, ...counted.map((s) => bars[1](s)));
    const at = (seconds) => left + ((seconds - from) / length) * (w - left - 2);
    const x = (s) => at(s.at).toFixed(1);
    const y = (v) => (bottom - (v / highest) * (bottom - top)).toFixed(1);
    const path = (value) => this.samples.map((s) => `${x(s)},${y(value(s))}`).join(" L");
    const bar = (s) => {
      const l = at(Math.max(s.from, from)), r = Math.max(l + 1, at(Math.min(s.from + 10, this.samples.at(-1).at)) - 1);
      return `M${l.toFixed(1)},${bottom} V${y(bars[1](s))} H${r.toFixed(1)} V${bottom} Z`;
    };
    const text = said.filter((part) => typeof part === "string").join("").trim();
    const all = shape(
      "svg",
      { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": [`${title}: ${text}.`, more, "The table below has them over time."].filter(Boolean).join(" ") },
      ...areas.map(([name, value]) => shape("path", { "data-load": name, d: `M${x(this.samples[0])},${bottom} L${path(value)} L${x(this.samples.at(-1))},${bottom} Z` })),
    );
    if (bars) all.append(shape("path", { "data-load": bars[0], d: counted.map(bar).join(" ") }));
    if (line) all.append(shape("path", { class: "mark", "stroke-dasharray": "5 4", d: `M${path(line)}` }));
    all.append(
      shape("line", { class: "axis", x1: left, x2: w, y1: bottom, y2: bottom }),
      shape("text", { x: left - 6, y: top + 8, "text-anchor": "end" }, short(highest)),
      shape("text", { x: left - 6, y: bottom, "text-anchor": "end" }, "0"),
    );
    return element("figure", { class: "chart" }, element("figcaption", {}, element("b", {}, title), element("span", {}, ...said)), all);
  }
}

// borrowers are what memory of peers is borrowed for: as the server names it, as the page does, and its color.
const borrowers = [
  ["experts", "copies of experts", "var(--peer)"],
  ["kv", "KV blocks", "var(--s3)"],
  ["relay", "relay buffers", "var(--s2)"],
];

// byBorrower is what each of them has of a peer.
const byBorrower = (p) => borrowers.map(([key]) => p.bytes_by_client?.[key] ?? 0);

// borrowed says what is borrowed of a peer, and what for.
export function borrowed(p) {
  const all = byBorrower(p), parts = all.map((n, k) => (n ? `${borrowers[k][1]} ${bytes(n)}` : "")).filter(Boolean);
  return `borrowed ${bytes(total(all))}${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

// Peers draws the memory of peers over time: what is borrowed, what for, and what other processes have.
export class Peers {
  constructor() {
    this.samples = [];
  }

  update(harvest, peers) {
    if (!harvest || !harvest.peers.length) return;
    this.samples.push({ at: Date.now() / 1e3, peers: harvest.peers });
    if (this.samples.length > 300) this.samples.shift();
    const w = 640, h = 96, left = 6, gap = 26;
    const from = this.samples[0].at, length = Math.max(30, this.samples.at(-1).at - from);
    const x = (at) => left + ((at - from) / length) * (w - 2 * left);
    const all = shape("svg", { viewBox: `0 0 ${w} ${harvest.peers.length * (h + gap)}`, role: "img" });
    harvest.peers.forEach((p, i) => {
      const top = i * (h + gap) + 16;
      const scale = (h - 4) / p.capacity_bytes;
      const area = (value) => {
        const points = this.samples.map((s) => [x(s.at), top + h - 4 - value(s.peers[i]) * scale]);
        return `M${x(from)},${top + h - 4} L${points.map((q) => q.map((v) => v.toFixed(1)).join(",")).join(" L")} L${points.at(-1)[0].toFixed(1)},${top + h - 4} Z`;
      };
      const name = peers.find((q) => q.device === p.device)?.name;
      all.append(
        ...borrowers.map((_, k) => shape("path", { "data-client": borrowers[k][0], d: area((s) => s.other_processes_bytes + total(byBorrower(s).slice(0, k + 1))), fill: borrowers[k][2] })).reverse(),
        shape("path", { d: area((s) => s.other_processes_bytes), fill: "var(--host)" }),
        shape("line", { class: "axis", x1: left, x2: w - left, y1: top + h - 4, y2: top + h - 4 }),
        shape("line", { class: "mark", "stroke-dasharray": "5 4", x1: left, x2: w - left, y1: top + p.headroom_bytes * scale, y2: top + p.headroom_bytes * scale }),
        shape("text", { x: left, y: top - 4 }, `${p.device}${name ? ` ${name}` : ""}, ${bytes(p.capacity_bytes)}: ${borrowed(p)}${p.draining_bytes ? `, draining ${bytes(p.draining_bytes)}` : ""}, others ${bytes(p.other_processes_bytes)}, ${p.health}`),
      );
    });
    const say = harvest.peers.map((p) => `${p.device}: ${borrowed(p)}, other processes ${bytes(p.other_processes_bytes)}, of ${bytes(p.capacity_bytes)}`).join("; ");
    all.setAttribute("aria-label", say);
    $("peers").replaceChildren(all, element("p", { class: "quiet" }, `The last ${span(this.samples.at(-1).at - from)}, from left to right.`));
    $("peers-legend").replaceChildren(
      ...borrowers.filter(([key]) => harvest.clients?.[key]).map(([, name, color]) => element("li", {}, swatch(color), `borrowed for ${name}`)),
      element("li", {}, element("i", { "data-tier": "host" }), "other processes"),
      element("li", {}, shape("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, shape("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: "currentColor", "stroke-dasharray": "5 4" })), "above it: the headroom, never borrowed"),
    );
  }
}

const causes = {
  "expert-copy": "copies of experts",
  "router-sync": "the host to read the router",
  "cpu-attention": "attention on the CPU",
  "kv-copy": "copies for attention on the CPU",
  "launch-bound": "launches",
  "kv-load": "KV blocks to be loaded",
  "cpu-experts": "experts on the CPU",
};
const names = Object.keys(causes);

// What there is to do about the waits, by cause.
const remedies = {
  "expert-copy": "Fewer offloaded experts (--offload-fraction), copies on peers (--peers), or more sequences in a step make it less.",
  "router-sync": "More sequences in a step, or kernels that read offloaded experts in place (--expert-access), make it less.",
  "cpu-attention": "With --attention gpu the GPU computes it, where the KV cache fits.",
  "kv-copy": "With --attention gpu there are no such copies, where the KV cache fits.",
  "launch-bound": "CUDA graphs (without --enforce-eager) and more sequences in a step make it less.",
  "kv-load": "More blocks on the GPU (a larger --offload-fraction, a shorter --max-model-len) make it less.",
  "cpu-experts": "A smaller --cpu-experts makes it less.",
};

const percent = (share) => `${number(100 * share, 0)} %`;

// bound names what a step was bound by.
function bound(b) {
  if (b.by === "compute") return "computing";
  return b.by === "link" ? `${b.src} → ${b.dst}` : `waiting for ${causes[b.by] ?? b.by}`;
}

// boundShare is the bound of a step with its share of the step's time.
const boundShare = (b) => `${bound(b)}, ${b.by === "link" ? "busy " : ""}${percent(b.share)}`;

// ofPredicted is a step's time as a share of what is predicted; undefined: nothing is.
const ofPredicted = (s) => (s.predicted_seconds ? percent(s.seconds / s.predicted_seconds) : undefined);

// stepText says of a step how long it took, what bound it, and how that compares with its prediction.
export function stepText(s) {
  const of = ofPredicted(s);
  return [
    `Step ${number(s.step)}: ${seconds(s.seconds)}, ${count(s.tokens, "token")} of ${count(s.sequences, "sequence")}`,
    `Bound by: ${s.bound ? `${boundShare(s.bound)} of the step` : "not known"}`,
    ...(of ? [`${of} of the predicted ${seconds(s.predicted_seconds)}`] : []),
  ].join("\n");
}

// bounds says what steps are bound by, the most frequent first.
export function bounds(steps) {
  const known = steps.filter((s) => s.bound);
  const all = new Map();
  for (const { bound: b } of known) {
    const name = bound(b), before = all.get(name) ?? { steps: 0, shares: 0 };
    all.set(name, { steps: before.steps + 1, shares: before.shares + b.share, link: b.by === "link" });
  }
  const sorted = [...all].sort(([, a], [, b]) => b.steps - a.steps);
  const name = ([name, x]) => (x.link ? `${name} (busy ${percent(x.shares / x.steps)} of their time)` : name);
  if (!sorted.length) return "";
  if (sorted.length === 1) return `All of these steps are bound by ${name(sorted[0])}.`;
  return `Of these steps ${sorted.map((x, i) => `${number(x[1].steps)} ${i ? "" : x[1].steps > 1 ? "are bound " : "is bound "}by ${name(x)}`).join(", ")}.`;
}

// Steps keeps the last steps, and draws how long they took and what they waited for.
export class Steps {
  constructor() {
    this.all = [];
    $("steps-legend").replaceChildren(
      element("li", {}, swatch("var(--compute)"), "computing"),
      ...names.map((n, i) => element("li", {}, swatch(`var(--s${i})`), `waiting for ${causes[n]}`)),
      element("li", {}, shape("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, shape("line", { x1: 2, x2: 22, y1: 6, y2: 6, stroke: "currentColor", "stroke-width": 2 })), "predicted"),
      element("li", {}, shape("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, shape("path", { d: "M6,10 L12,2 L18,10 Z", fill: "currentColor" })), "longer than the chart is high"),
    );
  }

  add(step) {
    this.all.push(step);
    if (this.all.length > 600) this.all.shift();
  }

  draw() {
    const shown = this.all.slice(-100);
    if (!shown.length) return;
    const w = 1200, h = 150, bottom = 18, left = 60;
    // A few long steps would make the others invisible: what is above is cut, and marked.
    const most = shown.map((s) => s.seconds).sort((a, b) => a - b)[Math.floor(0.97 * (shown.length - 1))] * 1.15;
    const y = (s) => (s / most) * (h - bottom - 10);
    const width = (w - left) / 100;
    const all = shape("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `The last ${shown.length} steps, the longest of ${seconds(Math.max(...shown.map((s) => s.seconds)))}. ${bounds(shown)} The table below has them.` });
    all.append(
      shape("line", { class: "axis", x1: left, x2: w, y1: h - bottom, y2: h - bottom }),
      shape("text", { x: left - 6, y: 14, "text-anchor": "end" }, seconds(most)),
      shape("text", { x: left - 6, y: h - bottom, "text-anchor": "end" }, "0"),
      shape("text", { x: left, y: h - 4 }, `step ${number(shown[0].step)}`),
      shape("text", { x: left + shown.length * width, y: h - 4, "text-anchor": "end" }, shown.length > 12 ? number(shown.at(-1).step) : ""),
    );
    shown.forEach((s, i) => {
      const stalls = names.map((n) => s.stalls?.[n] ?? 0);
      const waited = stalls.reduce((a, b) => a + b, 0);
      let at = h - bottom;
      // All of the step's column shows its text, not only what is drawn in it.
      const group = shape("g", {}, shape("title", {}, stepText(s)), shape("rect", { class: "column", x: left + i * width, y: 0, width, height: h - bottom }));
      all.append(group);
      [["var(--compute)", Math.max(0, s.seconds - waited)], ...stalls.map((t, k) => [`var(--s${k})`, t])].forEach(([color, t]) => {
        const height = Math.min(y(t), at - 10);
        if (height < 0.2) return;
        at -= height;
        group.append(shape("rect", { x: left + i * width + 0.5, y: at.toFixed(1), width: (width - 1).toFixed(1), height: height.toFixed(1), fill: color }));
      });
      if (s.seconds > most) {
        const [l, r] = [left + i * width, left + (i + 1) * width];
        group.append(shape("path", { class: "cut", d: `M${l},8 L${(l + r) / 2},0 L${r},8 Z` }));
      }
      if (s.predicted_seconds && s.predicted_seconds <= most) {
        const p = h - bottom - y(s.predicted_seconds);
        group.append(shape("line", { class: "mark", x1: left + i * width, x2: left + (i + 1) * width, y1: p.toFixed(1), y2: p.toFixed(1) }));
      }
    });
    $("steps").replaceChildren(all);
    this.bound(shown);
    this.compare(shown);
    rows(
      "steps-table",
      shown.slice(-40).reverse().map((s) => [
        number(s.step),
        number(s.tokens),
        number(s.sequences),
        number(s.seconds * 1e3, 2),
        s.predicted_seconds ? number(s.predicted_seconds * 1e3, 2) : "–",
        ofPredicted(s) ?? "–",
        s.bound ? boundShare(s.bound) : "not known",
        Object.entries(s.stalls ?? {}).map(([n, t]) => `${causes[n] ?? n} ${seconds(t)}`).join(", ") || "nothing",
        [...(s.fetches ? [`${number(s.fetches)} experts`] : []), ...(s.links ?? []).map((l) => `${l.src} → ${l.dst}: ${byPurpose(l.bytes_by_purpose).map(([, name, n]) => `${name} ${bytes(n)}`).join(", ")}`)].join("; ") || "nothing",
      ]),
      "",
    );
  }

  // bound says what the steps are bound by, and what would make their longest wait shorter.
  bound(shown) {
    const time = shown.reduce((t, s) => t + s.seconds, 0);
    const [longest, wait] = names.map((n) => [n, shown.reduce((t, s) => t + (s.stalls?.[n] ?? 0), 0)]).reduce((a, b) => (b[1] > a[1] ? b : a));
    $("bound").textContent = [bounds(shown), ...(wait < time / 10 ? [] : [`${percent(wait / time)} of their time is waiting for ${causes[longest]}. ${remedies[longest]}`])].join(" ");
  }

  compare(shown) {
    const with_ = shown.filter((s) => s.predicted_seconds);
    if (!with_.length) {
      $("compared").textContent = "The planner predicts no times: the hardware is not known.";
      return;
    }
    const median = (all) => all.sort((a, b) => a - b)[all.length >> 1];
    const measured = median(with_.map((s) => s.seconds)), predicted = median(with_.map((s) => s.predicted_seconds));
    $("compared").textContent = `Median of these steps: ${seconds(measured)}, ${percent(measured / predicted)} of the ${seconds(predicted)} that the planner predicts.`;
  }
}

// timed are the lanes of steps with timelines, in nanoseconds on their clock: of the GPU, then of each link that copied.
// The GPU computes in a step where it does not wait.
export function timed(steps) {
  const gpu = [], links = new Map();
  for (const { timeline: t } of steps) {
    let at = 0;
    const add = (name, from, to) => to > from && gpu.push({ for: name, from: t.begin_ns + from, to: t.begin_ns + to });
    for (const s of t.stalls) {
      add("computing", at, s.from_ns);
      add(s.for, s.from_ns, s.to_ns);
      at = s.to_ns;
    }
    add("computing", at, t.duration_ns);
    for (const l of t.links) {
      const name = `${l.src} → ${l.dst}`;
      if (!links.has(name)) links.set(name, []);
      for (const s of l.copies) links.get(name).push({ for: s.for, from: t.begin_ns + s.from_ns, to: t.begin_ns + s.to_ns });
    }
  }
  return [{ name: "GPU", spans: gpu }, ...[...links].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, spans]) => ({ name, spans }))];
}

// shares are those of a time that the spans of a lane take, by what they are for, the largest first.
export function shares(spans, from, to) {
  const all = new Map();
  for (const s of spans) {
    const n = Math.min(s.to, to) - Math.max(s.from, from);
    if (n > 0) all.set(s.for, (all.get(s.for) ?? 0) + n / (to - from));
  }
  return [...all].sort(([, a], [, b]) => b - a);
}

// parts of a lane have a name and a color by what they are for.
const parts = new Map([
  ["computing", ["computing", "var(--compute)"]],
  ...names.map((n, i) => [n, [`waiting for ${causes[n]}`, `var(--s${i})`]]),
]);
const copies = new Map(purposes.map(([key, name]) => [key, [name, { demand: "var(--s0)", prefetch: "var(--peer)", migration: "var(--s4)", "kv-load": "var(--s3)", "kv-store": "var(--s1)" }[key]]]));

// laneText says what a lane did in a time.
function laneText(lane, from, to) {
  const known = lane.name === "GPU" ? parts : copies;
  return shares(lane.spans, from, to).map(([key, share]) => `${known.get(key)?.[0] ?? key} ${share < 0.005 ? "<1 %" : percent(share)}`).join(", ");
}

// Timeline draws when the GPU computed and waited and when links copied, in consecutive steps.
export class Timeline {
  constructor() {
    this.runs = [[]]; // of consecutive steps with less than a second between two, the latest two
    $("timeline-legend").replaceChildren(
      element("li", {}, "GPU: the colors of the chart above, nothing between steps. Links:"),
      ...[...copies.values()].map(([name, color]) => element("li", {}, swatch(color), name)),
    );
  }

  add(step) {
    if (!step.timeline) return;
    const last = this.runs.at(-1), before = last.at(-1);
    const idle = before ? step.timeline.begin_ns - before.timeline.begin_ns - before.timeline.duration_ns : 0;
    if (before && (before.step + 1 !== step.step || idle < 0 || idle > 1e9)) this.runs = [last, [step]];
    else last.push(step);
    if (last.length > 12) last.shift();
  }

  draw() {
    // A run that has just begun is not shown before it is long enough, or as long as the one before.
    const [earlier, latest] = [this.runs[0], this.runs.at(-1)];
    const shown = earlier.length > latest.length ? earlier : latest;
    if (!shown.length) return;
    const lanes = timed(shown);
    const ends = (s) => [s.timeline.begin_ns, s.timeline.begin_ns + s.timeline.duration_ns];
    const from = ends(shown[0])[0], to = ends(shown.at(-1))[1];
    const w = Math.max(360, $("timeline").clientWidth), left = 104, row = 24, top = 4, bottom = top + lanes.length * row;
    const x = (at) => left + (Math.max(0, Math.min(1, (at - from) / (to - from))) * (w - left - 2));
    const all = shape("svg", { viewBox: `0 0 ${w} ${bottom + 18}`, role: "img" });
    let labeled = -Infinity;
    for (const s of shown) {
      const [begin, end] = ends(s).map(x);
      const said = lanes.map((l) => `${l.name}: ${laneText(l, ...ends(s)) || "nothing"}`);
      const group = shape("g", {}, shape("title", {}, [`Step ${number(s.step)}: ${seconds(s.timeline.duration_ns / 1e9)}`, ...said].join("\n")), shape("rect", { class: "column", x: begin, y: top, width: Math.max(0, end - begin), height: bottom - top }));
      group.append(shape("line", { class: "axis", x1: begin, x2: begin, y1: top, y2: bottom + 4 }));
      if (begin - labeled >= 76 && w - begin >= 70) {
        group.append(shape("text", { x: begin, y: bottom + 15 }, `${labeled < 0 ? "step " : ""}${number(s.step)}`));
        labeled = begin;
      }
      all.append(group);
    }
    lanes.forEach((lane, i) => {
      const y = top + i * row + 3, height = row - 6;
      all.append(shape("text", { x: left - 6, y: y + height - 5, "text-anchor": "end" }, lane.name), shape("line", { class: "axis", x1: left, x2: w, y1: y + height, y2: y + height }));
      const paths = new Map();
      for (const s of lane.spans) {
        if (s.to <= from || s.from >= to) continue;
        const l = x(s.from);
        paths.set(s.for, `${paths.get(s.for) ?? ""}M${l.toFixed(1)},${y} h${Math.max(0.5, x(s.to) - l).toFixed(1)} v${height} H${l.toFixed(1)} Z `);
      }
      const known = lane.name === "GPU" ? parts : copies;
      for (const [key, d] of paths) all.append(shape("path", { "data-lane": lane.name, "data-for": key, d, fill: known.get(key)?.[1] ?? "var(--none)", "pointer-events": "none" }));
    });
    const text = `${count(shown.length, "consecutive step")} in ${seconds((to - from) / 1e9)}. ${lanes.map((l) => `${l.name}: ${laneText(l, from, to) || "nothing"}`).join("; ")}.`;
    all.setAttribute("aria-label", `${text} The table below has each step.`);
    $("timeline").replaceChildren(all);
    $("timeline-said").textContent = text;
    rows(
      "timeline-table",
      [...shown].reverse().map((s) => [
        number(s.step),
        number(s.timeline.duration_ns / 1e6, 2),
        laneText(lanes[0], ...ends(s)),
        lanes.slice(1).map((l) => [l.name, laneText(l, ...ends(s))]).filter(([, said]) => said).map(([name, said]) => `${name}: ${said}`).join("; ") || "nothing",
      ]),
      "",
    );
  }
}

// tokens shows the tokens of a completion, and the experts that the step of each used.
export function tokens(all) {
  $("tokens").hidden = false;
  const byLayer = (routed) => {
    const layers = new Map();
    for (const [layer, expert] of routed) layers.set(layer, [...(layers.get(layer) ?? []), expert]);
    return [...layers].flatMap(([layer, experts]) => [element("b", {}, `${layer}: `), `${experts.join(" ")}  `]);
  };
  $("tokens").tBodies[0].replaceChildren(
    ...all.map(({ text, step }) =>
      element(
        "tr",
        {},
        element("td", {}, text ? JSON.stringify(text).slice(1, -1) : "(no text)"),
        element("td", {}, ...(step?.routed ? [...byLayer(step.routed), step.sequences > 1 ? `(with ${step.sequences - 1} other sequences)` : ""] : [step ? "the prompt's step, of many tokens" : "…"])),
      ),
    ),
  );
}

// happened puts an event on top of the list.
export function happened(e) {
  const rest = Object.entries(e)
    .filter(([k]) => k !== "event" && k !== "time")
    .map(([k, v]) => (k === "bytes" ? bytes(v) : k.endsWith("_ns") ? `${k.slice(0, -3)} ${seconds(v / 1e9)}` : `${k} ${v}`))
    .join(", ");
  const at = e.time ? new Date(e.time).toLocaleTimeString("en-GB") : "";
  $("events").prepend(element("li", {}, element("time", {}, at), `${e.event}: ${rest}`));
  while ($("events").children.length > 60) $("events").lastChild.remove();
}
