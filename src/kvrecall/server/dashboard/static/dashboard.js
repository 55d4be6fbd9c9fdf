// Asks the server every two seconds for what is new, and draws it.

import { heatMap, note, plot, spark, stacked } from "./charts.js";
import { age, bytes, clock, count, h, legend, median, percent, quantile, replace, seconds, swatch } from "./dom.js";
import { drawTree } from "./tree.js";

const EVERY_MS = 2000, TREE_EVERY_MS = 6000, GIVE_UP_MS = 8000;
const SOURCES = ["device", "host", "disk", "remote", "unspecified", "computed"];
const LOADED = ["host", "disk", "remote"];
const NOW_S = 60; // what "now" means for rates
const POINTS = 100; // at most, in a line
const color = (source) => `var(--${source})`;
const RECALLED = SOURCES.slice(0, -1);
const $ = (id) => document.getElementById(id);

const state = { samples: [], ended: [], latest: null, paused: false, since: 0, endedSince: 0, gone: null };

async function get(path) {
  const reply = await fetch(path, { signal: AbortSignal.timeout(GIVE_UP_MS), cache: "no-store" });
  if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
  return reply.json();
}

function status(kind, text) {
  const element = $("status");
  if (element.dataset.state !== kind || element.textContent !== text) {
    element.dataset.state = kind;
    element.textContent = text;
  }
}

const span = () => Number($("window").value);
const windowed = (list, at) => {
  const from = (state.latest?.now ?? 0) - span();
  return list.filter((each) => each[at] >= from);
};

const sum = (split) => SOURCES.reduce((total, source) => total + (split?.[source] ?? 0), 0);
const recalledOf = (split) => { const all = sum(split); return all ? 1 - (split.computed ?? 0) / all : 0; };

// ---- what went wrong ----------------------------------------------------------------------

const some = (many, word) => `${count(many)} ${word}${many === 1 ? "" : "s"}`;
const times = (many) => many === 1 ? "once" : `${count(many)} times`;

function drawTrouble() {
  const { gone, latest } = state;
  const old = latest ? ` The figures below are those of ${clock(latest.now)}.` : "";
  const text = gone ? `The server has not answered since ${clock(gone.since)}: ${gone.why}.${old} Look at the end of its log.`
    : latest?.pool_away ? `The pool does not answer: ${latest.pool_away}. Prompts are computed; nothing is recalled or saved.` : "";
  if ($("trouble").textContent !== text) $("trouble").textContent = text;
  document.title = `${text ? "(!) " : ""}${latest?.model ?? ""} · kvrecall`;
}

// ---- what is drawn ------------------------------------------------------------------------

// The last sample of each interval. Intervals begin at multiples of their length, which doubles as
// the history grows, so that a picture does not change but at its end.
function marksOf(samples) {
  let length = state.latest.every_s;
  while (length * POINTS < samples.at(-1).at - samples[0].at) length *= 2;
  const of = (sample) => Math.floor(sample.at / length);
  const marks = samples.filter((sample, i) => i + 1 === samples.length || of(sample) !== of(samples[i + 1]));
  if (marks.length > 2 && marks.at(-1).at - marks.at(-2).at < length / 2) marks.pop(); // just begun
  return marks;
}

// Of each interval between marks what `read` of a sample grew by, a second.
const rates = (marks, read) => marks.slice(1).map((mark, i) =>
  Math.max(0, read(mark) - read(marks[i])) / Math.max(0.001, mark.at - marks[i].at));

// How many values came into each bucket between two samples.
function grown(kind, from, to) {
  const last = to.buckets[kind];
  if (!last) return null;
  const first = from?.buckets[kind];
  return first ? last.map((many, i) => many - first[i]) : last;
}

function quantileOf(share, kind, from, to) {
  const rows = grown(kind, from, to);
  return rows && quantile(share, state.latest.bounds[kind], rows);
}

// A quantile at each mark, of the values in the time before it: a fifteenth of what is shown.
function quantiles(share, kind, marks) {
  const before = Math.max(20, span() / 15);
  let first = 0;
  return marks.slice(1).map((mark, i) => {
    while (marks[first + 1].at <= mark.at - before && first < i) first += 1;
    return quantileOf(share, kind, marks[first], mark);
  });
}

// The samples shown, or null, with the reason in the boxes, if there are too few.
function shown() {
  const samples = windowed(state.samples, "at");
  return samples.length < 3 ? null : samples;
}

const GATHERING = "Gathering figures: the first are there after some seconds.";
const LATENCY = { format: seconds, tell: seconds };

function drawRecall(marks, from) {
  const box = $("recall");
  if (!state.latest.pool) { replace(box, note("This server runs without a pool, so nothing is counted here.")); return; }
  if (!marks) { replace(box, note(GATHERING)); return; }
  const values = Object.fromEntries(SOURCES.map((source) => [source, rates(marks, (sample) => sample.tokens[source] ?? 0)]));
  const named = SOURCES.filter((source) => source !== "unspecified" || values[source].some((v) => v > 0));
  legend($("recall-legend"), named.map((source) => [source, color(source)]));
  const last = state.samples.at(-1).tokens, first = from.tokens;
  const totals = named.map((source) => `${source} ${count((last[source] ?? 0) - (first[source] ?? 0))}`);
  stacked(box, marks.slice(1).map((mark) => mark.at), named.map((source) => ({ label: source, color: color(source), values: values[source] })),
    `Prompt tokens per second, by source. Tokens in all: ${totals.join(", ")}.`);
}

// Tokens computed, by the reason why the first of them was not recalled, the costliest of the last 24 hours first.
function drawMissed(from) {
  const box = $("missed");
  if (!state.latest.pool) { replace(box, note("This server runs without a pool, so nothing can be missed.")); return; }
  if (!from) { replace(box, note(GATHERING)); return; }
  const { sample: { missed: now }, day, reasons } = state.latest;
  const since = (before) => (reason) => Math.max(0, now[reason] - (before?.[reason] ?? 0));
  const today = since(day.missed), recent = since(from.missed);
  const rows = Object.keys(now).filter((reason) => today(reason) || recent(reason)).sort((a, b) => today(b) - today(a));
  const all = rows.reduce((sum, reason) => sum + today(reason), 0);
  const age_s = state.latest.now - day.since;
  const long = age_s >= 86_000 ? "24 hours" : age(age_s);
  $("missed-note").textContent = all ? `${count(all)} tokens in the last ${long}` : "";
  if (!rows.length) { replace(box, note(`No prompt of the last ${long} was computed that could have been recalled.`)); return; }
  replace(box, h("table", { class: "missed" },
    h("thead", {}, h("tr", {}, ["reason", `last ${long}, tokens`, "share", "this window, tokens", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((reason) => h("tr", {},
      h("th", { scope: "row" }, reason), h("td", {}, count(today(reason))), h("td", {}, percent(all ? today(reason) / all : 0)),
      h("td", {}, count(recent(reason))),
      h("td", { class: "meaning" },
        h("span", { class: "share", style: { width: `${Math.max(0.5, 30 * today(reason) / Math.max(1, today(rows[0])))}%` }, "aria-hidden": "true" }),
        reasons[reason] ?? ""))))));
}

// The places at which requests of the last hour left known prompts, the costliest first.
function drawPartings() {
  const { partings } = state.latest;
  replace($("partings"), partings.length ? h("table", { class: "missed" },
    h("caption", { class: "muted" }, "Costliest places of the last hour at which prompts leave known ones"),
    h("thead", {}, h("tr", {}, ["at token", "computed behind, tokens", "requests", "the last one", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, partings.map((each) => h("tr", {},
      h("th", { scope: "row" }, count(each.token)), h("td", {}, count(each.tokens)), h("td", {}, count(each.requests)),
      h("td", {}, h("code", {}, each.example)), h("td", { class: "meaning" }, each.advice || "kvrecall why says more of it"))))) : null);
}

function quantileLines(kind, marks) {
  return [
    { label: "p50", color: "var(--ink)", values: quantiles(0.5, kind, marks) },
    { label: "p95", color: "var(--accent)", dash: "6 3", values: quantiles(0.95, kind, marks) },
  ];
}

function drawTtft(marks, from, range) {
  const box = $("ttft");
  const ended = windowed(state.ended, "ended").filter((each) => each.ttft_s > 0);
  const whole = quantileOf(0.5, "ttft", from, state.latest.sample);
  if (!marks || (!ended.length && whole === null)) { replace(box, note(marks ? "No request has had its first token in this window." : GATHERING)); return; }
  const points = ended.map((each) => ({ ...each, share: recalledOf(each.split) }));
  const half = (with_) => seconds(median(points.filter((point) => point.share >= 0.5 === with_).map((point) => [point.ttft_s, point.prompt_tokens])));
  const dot = (with_) => with_ ? "var(--host)" : "var(--computed)";
  legend($("ttft-legend"), [
    [`at least half recalled: ${half(true)}`, dot(true), "round"], [`mostly computed: ${half(false)}`, dot(false), "round"],
    ["p50", "var(--ink)", "line"], ["p95", "var(--accent)", "dash"],
  ]);
  plot(box, {
    ...range, times: marks.slice(1).map((mark) => mark.at), lines: quantileLines("ttft", marks), tall: 240,
    dots: points.filter((point) => point.ended >= range.from).map((point) => ({
      at: point.ended, value: point.ttft_s, color: dot(point.share >= 0.5), size: Math.max(2.5, Math.min(8, Math.sqrt(point.prompt_tokens) / 14)),
      tip: [["first token after", seconds(point.ttft_s)], ["prompt", `${count(point.prompt_tokens)} tokens`], ["of it recalled", percent(point.share), dot(point.share >= 0.5)]],
    })),
    scale: { ...LATENCY, log: true, unit: "time to first token, logarithmic" },
    label: `Time to first token of ${points.length} requests, and its p50 and p95. Medians, requests weighted by their prompts: with recall ${half(true)}, mostly computed ${half(false)}.`,
    caption: "Requests",
    figures: [["ended", "first token after", "prompt", "recalled"],
      points.slice(-60).reverse().map((point) => [clock(point.ended), seconds(point.ttft_s), `${count(point.prompt_tokens)} tokens`, percent(point.share)])],
  });
}

function drawTpot(marks, from, range) {
  const box = $("tpot");
  if (!marks || quantileOf(0.5, "tpot", from, state.latest.sample) === null) { replace(box, note(marks ? "No request with several output tokens has ended in this window." : GATHERING)); return; }
  const lines = quantileLines("tpot", marks);
  legend($("tpot-legend"), [["p50", "var(--ink)", "line"], ["p95", "var(--accent)", "dash"]]);
  plot(box, {
    ...range, times: marks.slice(1).map((mark) => mark.at), lines, tall: 240,
    scale: { ...LATENCY, unit: "time per output token" },
    label: "Time per output token after the first, a request's mean: p50 and p95.", caption: "Time per output token",
  });
}

function drawOutput(marks, range) {
  const box = $("output");
  if (!marks) { replace(box, note(GATHERING)); return; }
  legend($("output-legend"), [["output tokens", "var(--accent)", "line"]]);
  const lines = [{ label: "output", color: "var(--accent)", values: rates(marks, (sample) => sample.counts.output_tokens) }];
  const ended = rates(marks, (sample) => sample.counts.requests);
  const tell = (value) => `${value.toFixed(value < 10 ? 1 : 0)} tokens/s`;
  const at = marks.slice(1).map((mark) => mark.at);
  const prompt = rates(marks, (sample) => sample.counts.prompt_tokens);
  plot(box, {
    ...range, times: at, lines, scale: { format: count, tell, unit: "output tokens/s", least: 1 },
    label: "Output tokens per second.", caption: "Throughput",
    figures: [["until", "output", "prompts", "requests ended"], at.map((time, i) => [clock(time), tell(lines[0].values[i]), tell(prompt[i]), `${ended[i].toFixed(2)} /s`]).slice(-60).reverse()],
  });
}

function drawQueue(marks, range) {
  const box = $("queue");
  if (!marks) { replace(box, note(GATHERING)); return; }
  legend($("queue-legend"), [["running", "var(--accent)", "line"], ["waiting", "var(--disk)", "dash"], ["preempted", "var(--bad)", "mark"]]);
  const most = (name) => marks.slice(1).map((mark) => mark.most[name]);
  const at = marks.slice(1).map((mark) => mark.at);
  const cut = marks.slice(1).map((mark, i) => mark.counts.preemptions - marks[i].counts.preemptions);
  const lines = [
    { label: "running", color: "var(--accent)", values: most("running") },
    { label: "waiting", color: "var(--disk)", dash: "5 3", values: most("waiting") },
  ];
  plot(box, {
    ...range, times: at, lines, scale: { format: count, tell: (value) => `${count(value)} requests`, unit: `requests, maximum of samples every ${state.latest.every_s} s`, least: 2, whole: true },
    marks: cut.flatMap((many, i) => many > 0 ? [{ at: at[i], text: some(many, "preemption") }] : []),
    label: `Requests running and waiting. ${some(cut.reduce((a, b) => a + b, 0), "preemption")}.`, caption: "Requests and preemptions",
    figures: [["until", "running", "waiting", "preempted"], at.map((time, i) => [clock(time), `${lines[0].values[i]} requests`, `${lines[1].values[i]} requests`, times(cut[i])]).filter((_, i) => lines[0].values[i] + lines[1].values[i] + cut[i] > 0).slice(-60).reverse()],
  });
}

function drawLoads(marks, from, range) {
  const box = $("load"), now = state.latest.sample;
  const facts = $("load-facts");
  replace(facts);
  legend($("load-legend"), []);
  if (!state.latest.pool) { replace(box, note("This server runs without a pool, so nothing is loaded.")); return; }
  const tiers = LOADED.filter((tier) => grown(`load:${tier}`, from, now)?.at(-1));
  if (!marks || !tiers.length) { replace(box, note(marks ? "Nothing was loaded from the pool in this window." : GATHERING)); return; }
  legend($("load-legend"), [...tiers.map((tier) => [tier, color(tier)]), ["p50", "var(--soft)", "line"], ["p95", "var(--soft)", "dash"]]);
  plot(box, {
    ...range, times: marks.slice(1).map((mark) => mark.at),
    lines: tiers.flatMap((tier) => [
      { label: `${tier} p50`, color: color(tier), values: quantiles(0.5, `load:${tier}`, marks) },
      { label: `${tier} p95`, color: color(tier), dash: "6 3", values: quantiles(0.95, `load:${tier}`, marks) },
    ]),
    scale: { ...LATENCY, log: true, unit: "time of a load, logarithmic" },
    label: `Load latency: ${tiers.map((tier) => `${tier} p95 ${seconds(quantileOf(0.95, `load:${tier}`, from, now))}`).join(", ")}.`, caption: "Load latency by tier",
  });
  const copied = now.counts.loaded_bytes - from.counts.loaded_bytes, took = now.counts.load_seconds - from.counts.load_seconds;
  replace(facts, tiers.map((tier) => {
    const kind = `load:${tier}`, many = grown(kind, from, now).at(-1);
    return h("div", {}, `${tier}: ${some(many, "load")}, p50 ${seconds(quantileOf(0.5, kind, from, now))}, p95 ${seconds(quantileOf(0.95, kind, from, now))}`);
  }),
    took > 0 ? h("div", {}, `copies to the device: ${bytes(copied)} at ${bytes(copied / took)}/s${ofGroups(now, from)}`) : null);
}

function ofGroups(now, from) {
  const kinds = Object.entries(now.loaded ?? {}).map(([kind, blocks]) => [kind, blocks - (from.loaded?.[kind] ?? 0)]);
  if (kinds.every(([kind]) => kind === "full")) return "";
  return `, blocks: ${kinds.map(([kind, blocks]) => `${count(blocks)} ${kind}`).join(", ")}`;
}

function drawTiers() {
  const tiers = state.latest.sample?.tiers ?? {};
  const names = ["device", "host", "disk", "remote"].filter((name) => tiers[name]);
  if (!names.length) { replace($("tiers"), note("No pool: there is the device's cache only, and vLLM has not told of it yet.")); return; }
  const shareOf = (tier) => !tier ? null : tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : tier.share ?? 0;
  const samples = windowed(state.samples, "at");
  const over = (name, shares) => samples.length > 2 ? spark(samples.map((each) => each.at), shares, samples[0].at, samples.at(-1).at, color(name), `${name} in use over time, 0 to 100 %`) : null;
  const away = state.latest.pool_away;
  replace($("tiers"), names.map((name) => {
    const tier = tiers[name];
    const shares = samples.map((each) => name !== "device" && !each.pool_up ? null : shareOf(each.tiers[name]));
    if (away && name !== "device") {
      return h("div", { class: "tier" },
        h("div", { class: "line" }, h("b", {}, swatch(color(name)), name), h("span", {}, "unknown: the pool does not answer")),
        over(name, shares));
    }
    const share = shareOf(tier);
    const size = tier.capacity_bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}` : tier.share === undefined ? bytes(tier.used_bytes) : `${percent(share)} of its blocks`;
    const facts = [];
    if (tier.blocks !== undefined) facts.push(`${count(tier.blocks)} blocks`);
    if (tier.given_bytes) facts.push(`compressed to ${percent(tier.compressed_bytes / tier.given_bytes)}`);
    if (tier.hits) facts.push(`${count(tier.hits)} hits`);
    if (tier.evictions) facts.push(`${count(tier.evictions)} evicted`);
    if (tier.dropped) facts.push(`${count(tier.dropped)} not stored`);
    if (tier.errors) facts.push(`${count(tier.errors)} errors`);
    if (tier.corrupt) facts.push(`${count(tier.corrupt)} corrupt, dropped`);
    return h("div", { class: "tier" },
      h("div", { class: "line" }, h("b", {}, swatch(color(name)), name), h("span", {}, size)),
      h("div", { class: "meter", role: "meter", "aria-label": `${name} in use`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) },
        h("span", { style: { width: `${(100 * Math.min(1, share)).toFixed(1)}%`, background: color(name) } })),
      h("div", { class: "facts" }, facts.join(" · ")),
      over(name, shares));
  }));
}

function drawHeat() {
  const { heat, heat_note: why } = state.latest;
  if (!heat) { replace($("heat"), note(why)); return; }
  heatMap($("heat"), heat, `Share of middle blocks chosen, ${heat.layers.length} layers by ${heat.shares[0].length} places in the context.`);
}

function splitBar(split) {
  const all = sum(split);
  if (!all) return "–";
  const words = SOURCES.filter((source) => split[source]).map((source) => `${source} ${count(split[source])}`);
  return h("span", { class: "split", role: "img", "aria-label": words.join(", "), title: words.join(", ") },
    SOURCES.filter((source) => split[source]).map((source) =>
      h("span", { style: { width: `${(100 * split[source]) / all}%`, background: color(source) } })));
}

function drawRequests() {
  const now = state.latest.now;
  const live = [...state.latest.live].sort((a, b) => b.began - a.began);
  const ended = [...state.ended].sort((a, b) => b.ended - a.ended).slice(0, 50);
  const more = state.latest.live_total - live.length;
  $("requests-note").textContent = `${state.latest.live_total} in flight${more > 0 ? ` (${more} not shown)` : ""}, ${ended.length} of the last that ended`;
  if (!live.length && !ended.length) { replace($("requests"), note("No requests yet. Send one twice to see recall.")); return; }
  const row = (each) => h("tr", {},
    h("td", {}, h("span", { class: "pill", "data-state": each.phase }, each.phase)),
    h("td", {}, h("code", {}, each.id.length > 28 ? `${each.id.slice(0, 27)}…` : each.id)),
    h("td", {}, clock(each.began)),
    h("td", {}, count(each.prompt_tokens)),
    h("td", {}, splitBar(each.split)),
    h("td", {}, sum(each.split) ? percent(recalledOf(each.split)) : "–"),
    h("td", {}, each.missed?.reason ?? "–"),
    h("td", {}, each.ttft_s > 0 ? seconds(each.ttft_s) : "–"),
    h("td", {}, each.output_tokens === null ? "–" : count(each.output_tokens)),
    h("td", {}, each.ended && each.ttft_s > 0 && each.output_tokens > 1 ? seconds((each.ended - each.began - each.ttft_s) / (each.output_tokens - 1)) : "–"),
    h("td", {}, seconds(each.ended ? each.ended - each.began : now - each.began)));
  const box = $("requests"), top = box.scrollTop;
  replace(box, h("table", {},
    h("caption", { class: "unseen" }, "Requests in flight and the last that ended"),
    h("thead", {}, h("tr", {}, ["state", "request", "began", "prompt, tokens", "from", "recalled", "missed because", "first token", "output, tokens", "per output token", "time"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, live.map(row), ended.map(row))));
  box.scrollTop = top;
}

function tile(name, value, more) {
  const [number, ...unit] = value.split(" ");
  return h("div", { class: "tile" }, h("div", { class: "name" }, name),
    h("div", { class: "value" }, number, unit.length ? h("small", {}, ` ${unit.join(" ")}`) : null), h("div", { class: "more" }, more.replaceAll(/(?<=\d) (?=%|m?s\b|[kMG]\b)/g, "\u00a0")));
}

const rate = (value, unit) => `${value > 0 && value < 10 ? value.toFixed(value < 1 ? 2 : 1) : count(value)} ${unit}`;

function drawTiles(from) {
  const now = state.latest.sample, began = from ?? now;
  const split = Object.fromEntries(SOURCES.map((source) => [source, Math.max(0, (now.tokens[source] ?? 0) - (began.tokens[source] ?? 0))]));
  const all = sum(split), recalled = all - split.computed;
  const best = RECALLED.filter((source) => split[source]).map((source) => `${source} ${Math.round((100 * split[source]) / all)} %`).join(" · ");
  const at = (share, kind) => seconds(from && quantileOf(share, kind, from, now));
  const recent = state.samples.find((sample) => sample.at >= state.latest.now - NOW_S) ?? began;
  const over = Math.max(1, now.at - recent.at);
  const lately = (name) => Math.max(0, now.counts[name] - recent.counts[name]) / over;
  const cut = now.counts.preemptions - began.counts.preemptions;
  const { retrieval } = now;
  replace($("tiles"),
    tile("Prompt tokens recalled", all ? percent(recalled / all) : "–", all ? `${best || "all computed"}, of ${count(all)} tokens` : "no prompts in this window"),
    tile("Time to first token, p50", at(0.5, "ttft"), `p95 ${at(0.95, "ttft")}`),
    tile("Time per output token, p50", at(0.5, "tpot"), `p95 ${at(0.95, "tpot")}`),
    tile("Output, last minute", rate(lately("output_tokens"), "tokens/s"), `prompts ${rate(lately("prompt_tokens"), "tokens/s")}`),
    tile("Requests, last minute", rate(lately("requests"), "requests/s"), `${count(now.counts.running)} running · ${count(now.counts.waiting)} waiting · ${count(now.counts.requests)} ended`),
    tile("Preemptions", some(cut, "request"), `in this window; ${count(now.counts.preemptions)} since the start`),
    tile("Sparse decoding", retrieval.steps ? `${percent((retrieval.steps_sparse ?? 0) / retrieval.steps)} of steps` : "off",
      retrieval.considered ? `${percent(retrieval.selected / retrieval.considered)} of blocks chosen` : "retrieval attention"));
  $("tiles").removeAttribute("aria-busy");
}

function draw() {
  drawTrouble();
  if (!state.latest) return;
  const samples = shown();
  const marks = samples && withMost(marksOf(samples), samples);
  const from = samples?.[0];
  const range = samples && { from: samples[0].at, to: samples.at(-1).at };
  drawTiles(from);
  drawRecall(marks, from);
  drawMissed(from);
  drawPartings();
  drawTtft(marks, from, range);
  drawTpot(marks, from, range);
  drawOutput(marks, range);
  drawQueue(marks, range);
  drawLoads(marks, from, range);
  drawTiers();
  drawHeat();
  drawRequests();
}

// Adds to each mark how many requests ran and waited at most since the one before.
function withMost(marks, samples) {
  let i = 0;
  return marks.map((mark) => {
    const most = { running: 0, waiting: 0 };
    for (; i < samples.length && samples[i].at <= mark.at; i += 1) {
      for (const name of ["running", "waiting"]) most[name] = Math.max(most[name], samples[i].counts[name]);
    }
    return { ...mark, most };
  });
}

// ---- what is asked -------------------------------------------------------------------------

async function poll() {
  const told = await get(`dashboard/data.json?since=${state.since}&ended_since=${state.endedSince}`);
  if (state.latest && told.boot !== state.latest.boot) { state.samples = []; state.ended = []; state.since = 0; state.endedSince = 0; state.latest = told; return poll(); }
  state.latest = told;
  for (const sample of told.samples) { // histograms that did not change are left out
    sample.buckets = { ...state.samples.at(-1)?.buckets, ...sample.buckets };
    state.samples.push(sample);
  }
  state.ended.push(...told.ended);
  state.since = told.samples.at(-1)?.at ?? state.since;
  state.endedSince = told.ended.at(-1)?.ended ?? state.endedSince;
  state.samples.splice(0, Math.max(0, state.samples.length - told.kept_samples));
  state.ended.splice(0, Math.max(0, state.ended.length - told.kept_requests));
  $("model").textContent = told.model.startsWith("/") ? told.model.split("/").filter(Boolean).at(-1) : told.model;
  $("model").title = told.model;
  $("version").textContent = `kvrecall ${told.version} · up ${age(told.uptime_s)} · samples every ${told.every_s} s, kept for ${age(told.kept_samples * told.every_s)}`;
  state.gone = null;
  status("live", "live");
  draw();
}

async function pollTree() {
  const told = await get("dashboard/tree.json");
  $("tree-note").textContent = told.note;
  if (told.roots.length) drawTree($("tree"), told.roots);
  else replace($("tree"), note(told.empty));
}

function lost(error) {
  console.warn(error);
  status("gone", `no answer since ${state.latest ? clock(state.latest.now) : "the start"}`);
  state.gone ??= { since: state.latest?.now ?? Date.now() / 1000, why: error.name === "TimeoutError" ? `nothing came in ${GIVE_UP_MS / 1000} s` : error.message };
  drawTrouble();
}

async function keep(work, everyMs, failed) {
  for (;;) {
    if (!state.paused && document.visibilityState !== "hidden") {
      try { await work(); } catch (error) { failed(error); }
    }
    await new Promise((resolve) => setTimeout(resolve, everyMs));
  }
}

// ---- controls ------------------------------------------------------------------------------

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = $("theme");
  button.textContent = THEMES[theme];
  button.setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
  button.dataset.value = theme;
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf($("theme").dataset.value) + 1) % names.length];
  applyTheme(next);
  try { localStorage.setItem("kvrecall-theme", next); } catch { /* private windows */ }
});
let theme = "auto";
try { theme = localStorage.getItem("kvrecall-theme") ?? "auto"; } catch { /* private windows */ }
applyTheme(theme in THEMES ? theme : "auto");

$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").textContent = state.paused ? "Resume" : "Pause";
  $("pause").setAttribute("aria-pressed", String(state.paused));
  status(state.paused ? "paused" : "live", state.paused ? `paused at ${clock(state.latest?.now ?? Date.now() / 1000)}` : "live");
});
$("window").addEventListener("change", draw);
let resize = 0;
addEventListener("resize", () => { cancelAnimationFrame(resize); resize = requestAnimationFrame(draw); });

keep(poll, EVERY_MS, lost);
keep(pollTree, TREE_EVERY_MS, (error) => console.warn(error));
