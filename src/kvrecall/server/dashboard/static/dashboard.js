// Asks the server every two seconds for what is new, and draws it.

import { heatMap, note, scatter, spark, stacked } from "./charts.js";
import { age, bytes, clock, count, h, legend, median, percent, replace, seconds, swatch } from "./dom.js";
import { drawTree } from "./tree.js";

const EVERY_MS = 2000, TREE_EVERY_MS = 6000, GIVE_UP_MS = 8000;
const SOURCES = ["device", "host", "disk", "remote", "unspecified", "computed"];
const color = (source) => `var(--${source})`;
const RECALLED = SOURCES.slice(0, -1);
const $ = (id) => document.getElementById(id);

const state = { samples: [], ended: [], latest: null, paused: false, since: 0, endedSince: 0 };

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

const windowed = (list, at) => {
  const from = (state.latest?.now ?? 0) - Number($("window").value);
  return list.filter((each) => each[at] >= from);
};

const sum = (split) => SOURCES.reduce((total, source) => total + (split?.[source] ?? 0), 0);
const recalledOf = (split) => { const all = sum(split); return all ? 1 - (split.computed ?? 0) / all : 0; };

// ---- what is drawn ------------------------------------------------------------------------

// The last sample of each interval. Intervals begin at multiples of their length, which doubles as
// the history grows, so that a picture does not change but at its end.
function increments(samples) {
  let length = state.latest.every_s;
  while (length * 100 < samples.at(-1).at - samples[0].at) length *= 2;
  const of = (sample) => Math.floor(sample.at / length);
  const kept = samples.filter((sample, i) => i + 1 === samples.length || of(sample) !== of(samples[i + 1]));
  const times = kept.slice(1).map((sample) => sample.at);
  const values = {};
  for (const source of SOURCES) {
    values[source] = kept.slice(1).map((sample, i) =>
      Math.max(0, (sample.tokens[source] ?? 0) - (kept[i].tokens[source] ?? 0)));
  }
  return { times, values, every: kept.length > 1 ? (kept.at(-1).at - kept[0].at) / (kept.length - 1) : 0 };
}

function drawRecall() {
  const box = $("recall");
  const samples = windowed(state.samples, "at");
  if (!state.latest.pool) { replace(box, note("This server runs without a pool, so nothing is counted here.")); return; }
  if (samples.length < 3) { replace(box, note("Gathering figures.")); return; }
  const { times, values, every } = increments(samples);
  if (times.length < 2) { replace(box, note("Gathering figures.")); return; }
  const shown = SOURCES.filter((source) => source !== "unspecified" || values[source].some((v) => v > 0));
  legend($("recall-legend"), shown.map((source) => [source, color(source)]));
  const totals = shown.map((source) => `${source} ${count(values[source].reduce((a, b) => a + b, 0))}`);
  stacked(box, times, shown.map((source) => ({ label: source, color: color(source), values: values[source] })),
    `Prompt tokens every ${Math.round(every)} seconds, by source. In all: ${totals.join(", ")}.`);
}

function drawTtft() {
  const box = $("ttft");
  const ended = windowed(state.ended, "ended").filter((each) => each.ttft_s > 0);
  if (!ended.length) { replace(box, note("No request has ended in this window.")); return; }
  const points = ended.map((each) => {
    const recalled = recalledOf(each.split);
    return { at: each.ended, seconds: each.ttft_s, tokens: each.prompt_tokens, recalled, kind: recalled >= 0.5 ? "recalled" : "computed" };
  });
  const of = (kind) => points.filter((point) => point.kind === kind).map((point) => [point.seconds, point.tokens]);
  const kinds = {
    recalled: { color: "var(--host)", median: median(of("recalled")) },
    computed: { color: "var(--computed)", median: median(of("computed")) },
  };
  legend($("ttft-legend"), [["at least half recalled", kinds.recalled.color, true], ["mostly computed", kinds.computed.color, true]]);
  const to = state.latest.now;
  const from = Math.max(to - Number($("window").value), Math.min(...points.map((p) => p.at)) - 5);
  scatter(box, from, to, points, kinds,
    `Time to first token of ${points.length} requests. Median, requests weighed by their prompts: with recall ${seconds(kinds.recalled.median)}, mostly computed ${seconds(kinds.computed.median)}.`);
}

function drawTiers() {
  const tiers = state.latest.sample?.tiers ?? {};
  const names = ["device", "host", "disk", "remote"].filter((name) => tiers[name]);
  if (!names.length) { replace($("tiers"), note("No pool: there is the device's cache only, and vLLM has not told of it yet.")); return; }
  const shareOf = (tier) => !tier ? null : tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : tier.share ?? 0;
  const samples = windowed(state.samples, "at");
  replace($("tiers"), names.map((name) => {
    const tier = tiers[name];
    const share = shareOf(tier);
    const size = tier.capacity_bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}` : tier.share === undefined ? bytes(tier.used_bytes) : `${percent(share)} of its blocks`;
    const facts = [];
    if (tier.blocks !== undefined) facts.push(`${count(tier.blocks)} blocks`);
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
      samples.length > 2 ? spark(samples.map((each) => each.at), samples.map((each) => shareOf(each.tiers[name])), samples[0].at, samples.at(-1).at, color(name), `${name} in use over time`) : null);
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
  $("requests-note").textContent = `${state.latest.live_total} under way${more > 0 ? ` (${more} not shown)` : ""}, ${ended.length} of the last that ended`;
  if (!live.length && !ended.length) { replace($("requests"), note("No requests yet. Send one, twice, to see recall.")); return; }
  const row = (each) => h("tr", {},
    h("td", {}, h("span", { class: "pill", "data-state": each.phase }, each.phase)),
    h("td", {}, h("code", {}, each.id.length > 28 ? `${each.id.slice(0, 27)}…` : each.id)),
    h("td", {}, clock(each.began)),
    h("td", {}, count(each.prompt_tokens)),
    h("td", {}, splitBar(each.split)),
    h("td", {}, sum(each.split) ? percent(recalledOf(each.split)) : "–"),
    h("td", {}, each.ttft_s > 0 ? seconds(each.ttft_s) : "–"),
    h("td", {}, each.output_tokens === null ? "–" : count(each.output_tokens)),
    h("td", {}, seconds(each.ended ? each.ended - each.began : now - each.began)));
  const box = $("requests"), top = box.scrollTop;
  replace(box, h("table", {},
    h("thead", {}, h("tr", {}, ["state", "request", "began", "prompt", "from", "recalled", "first token", "answer", "time"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, live.map(row), ended.map(row))));
  box.scrollTop = top;
}

function tile(name, value, unit, more) {
  return h("div", { class: "tile" }, h("div", { class: "name" }, name),
    h("div", { class: "value" }, value, unit ? h("small", {}, ` ${unit}`) : null), h("div", { class: "more" }, more));
}

function drawTiles() {
  const samples = windowed(state.samples, "at");
  const first = samples[0]?.tokens ?? {}, last = samples.at(-1)?.tokens ?? {};
  const grown = Object.fromEntries(SOURCES.map((source) => [source, Math.max(0, (last[source] ?? 0) - (first[source] ?? 0))]));
  const all = sum(grown), recalled = all - grown.computed;
  const ended = windowed(state.ended, "ended").filter((each) => each.ttft_s > 0);
  const times = (with_) => median(ended.filter((each) => recalledOf(each.split) >= 0.5 === with_).map((each) => [each.ttft_s, each.prompt_tokens]));
  const now = state.latest.sample ?? {};
  const best = RECALLED.filter((source) => grown[source]).map((source) => `${source} ${Math.round((100 * grown[source]) / all)} %`).join(" · ");
  const parts = seconds(times(true)).split(" ");
  replace($("tiles"),
    tile("Prompt tokens recalled", all ? percent(recalled / all) : "–", "", all ? best || "all computed" : "none asked in this window"),
    tile("Tokens not computed", count(recalled), "", `of ${count(all)} asked`),
    tile("First token with recall", parts[0], parts[1], `mostly computed: ${seconds(times(false))}`),
    tile("Requests", count(now.running ?? 0), "running", `${count(now.waiting ?? 0)} waiting · ${count(now.requests ?? 0)} ended`),
    tile("Sparse decoding", now.retrieval?.steps ? percent(now.retrieval.steps_sparse / now.retrieval.steps) : "off", now.retrieval?.steps ? "of steps" : "",
      now.retrieval?.considered ? `${percent(now.retrieval.selected / now.retrieval.considered)} of blocks chosen` : "retrieval attention"));
}

function draw() {
  if (!state.latest) return;
  for (const part of [drawTiles, drawRecall, drawTtft, drawTiers, drawHeat, drawRequests]) part();
}

// ---- what is asked -------------------------------------------------------------------------

async function poll() {
  const told = await get(`dashboard/data.json?since=${state.since}&ended_since=${state.endedSince}`);
  if (state.latest && told.boot !== state.latest.boot) { state.samples = []; state.ended = []; state.since = 0; state.endedSince = 0; state.latest = told; return poll(); }
  state.latest = told;
  state.samples.push(...told.samples);
  state.ended.push(...told.ended);
  state.since = told.samples.at(-1)?.at ?? state.since;
  state.endedSince = told.ended.at(-1)?.ended ?? state.endedSince;
  state.samples.splice(0, state.samples.length - told.kept_samples);
  state.ended.splice(0, state.ended.length - told.kept_requests);
  $("model").textContent = told.model.startsWith("/") ? told.model.split("/").filter(Boolean).at(-1) : told.model;
  $("model").title = told.model;
  document.title = `${told.model} · kvrecall`;
  $("version").textContent = `kvrecall ${told.version} · up ${age(told.uptime_s)} · samples every ${told.every_s} s, kept for ${age(told.kept_samples * told.every_s)}`;
  status("live", "live");
  draw();
}

async function pollTree() {
  const told = await get("dashboard/tree.json");
  $("tree-note").textContent = told.note;
  if (told.roots.length) drawTree($("tree"), told.roots);
  else replace($("tree"), note(told.empty));
}

async function keep(work, everyMs) {
  for (;;) {
    if (!state.paused && document.visibilityState !== "hidden") {
      try { await work(); } catch (error) {
        console.warn(error);
        status("gone", `no answer since ${state.latest ? clock(state.latest.now) : "the start"}`);
      }
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
  $("pause").textContent = state.paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", String(state.paused));
  status(state.paused ? "paused" : "live", state.paused ? `paused at ${clock(state.latest?.now ?? Date.now() / 1000)}` : "live");
});
$("window").addEventListener("change", draw);
let resize = 0;
addEventListener("resize", () => { cancelAnimationFrame(resize); resize = requestAnimationFrame(draw); });

keep(poll, EVERY_MS);
keep(pollTree, TREE_EVERY_MS);
