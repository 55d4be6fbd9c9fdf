// Drawings in SVG, made anew with every new figure. Each has a table of the same numbers.

import { clock, count, h, hideTip, percent, replace, s, seconds, showTip } from "./dom.js";

const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 24;

export const note = (text) => h("p", { class: "note" }, text);

function ticks(most, wanted = 4) {
  const rough = Math.max(most, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let value = 0; found.length < 2 || found.at(-1) < most; value += step) found.push(value);
  return found;
}

function timeAxis(from, to, x, bottom) {
  const span = to - from;
  const step = [10, 30, 60, 120, 300, 600].find((n) => span / n <= 8) ?? 600;
  const marks = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    const label = step < 60 ? clock(at) : clock(at).slice(0, 5);
    marks.push(s("text", { x: x(at), y: bottom + 16, "text-anchor": "middle" }, label));
  }
  return marks;
}

function table(caption, heads, rows) {
  return h("details", { class: "figures" },
    h("summary", {}, "The figures as a table"),
    h("div", { class: "scroll", tabindex: 0 },
      h("table", {}, h("caption", { class: "muted" }, caption),
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))))));
}

// Keeps the open table open, and the pointer's tooltip, over redraws.
function put(box, svg, figures) {
  const open = box.querySelector("details")?.open;
  if (figures && open) figures.open = true;
  replace(box, svg, figures ?? null);
}

// series: [{label, color, values}], values as heights per interval that ends at times[i]
export function stacked(box, times, series, label) {
  const width = Math.max(280, box.clientWidth), height = 230;
  const from = times[0], to = times.at(-1);
  const sums = times.map((_, i) => series.reduce((sum, one) => sum + one.values[i], 0));
  const marks = ticks(Math.max(...sums, 1));
  const most = marks.at(-1);
  const bottom = height - BOTTOM;
  const x = (at) => LEFT + ((at - from) / Math.max(1, to - from)) * (width - LEFT - RIGHT);
  const y = (value) => bottom - (value / most) * (bottom - TOP);
  const beneath = times.map(() => 0);
  const areas = series.map((one) => {
    const low = [...beneath];
    one.values.forEach((value, i) => { beneath[i] += value; });
    const edge = (heights) => times.map((at, i) => `${x(at).toFixed(1)},${y(heights[i]).toFixed(1)}`);
    const path = `M${edge(beneath).join("L")}L${edge(low).reverse().join("L")}Z`;
    return s("path", { d: path, fill: one.color, "fill-opacity": 0.9, stroke: "var(--card)", "stroke-width": 0.6 });
  });
  const cross = s("line", { class: "cross", y1: TOP, y2: bottom, visibility: "hidden" });
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label },
    marks.map((mark) => s("line", { class: mark ? "gridline" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) })),
    marks.map((mark) => s("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, count(mark))),
    timeAxis(from, to, x, bottom), areas, cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = from + ((event.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * (to - from);
    let near = 0;
    times.forEach((time, i) => { if (Math.abs(time - at) < Math.abs(times[near] - at)) near = i; });
    cross.setAttribute("x1", x(times[near])); cross.setAttribute("x2", x(times[near]));
    cross.setAttribute("visibility", "visible");
    showTip(event, clock(times[near]), [...series].reverse().map((one) => [one.label, count(one.values[near]), one.color]));
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  const rows = times.map((at, i) => [clock(at), ...series.map((one) => count(one.values[i]))])
    .filter((_, i) => sums[i] > 0).slice(-60).reverse();
  put(box, svg, table("Tokens per interval", ["until", ...series.map((one) => one.label)], rows));
}

// points: [{at, seconds, tokens, recalled, kind}]
export function scatter(box, from, to, points, kinds, label) {
  const width = Math.max(280, box.clientWidth), height = 230;
  const bottom = height - BOTTOM;
  const lowest = Math.min(...points.map((p) => p.seconds)), highest = Math.max(...points.map((p) => p.seconds));
  const low = Math.floor(Math.log10(Math.max(1e-4, lowest * 0.9)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(1e-3, highest * 1.05))));
  const x = (at) => LEFT + ((at - from) / Math.max(1, to - from)) * (width - LEFT - RIGHT);
  const y = (value) => bottom - ((Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)) * (bottom - TOP);
  const marks = [];
  for (let power = low; power <= high; power += 1) marks.push(10 ** power);
  const dots = points.map((point) => s("circle", {
    cx: x(point.at).toFixed(1), cy: y(point.seconds).toFixed(1),
    r: Math.max(3, Math.min(9, Math.sqrt(point.tokens) / 12)),
    fill: kinds[point.kind].color, "fill-opacity": 0.65, stroke: kinds[point.kind].color,
    onpointermove: (event) => showTip(event, clock(point.at), [
      ["first token after", seconds(point.seconds)],
      ["prompt", `${count(point.tokens)} tokens`],
      ["of it recalled", percent(point.recalled), kinds[point.kind].color],
    ]),
    onpointerleave: hideTip,
  }));
  const medians = Object.values(kinds).filter((kind) => kind.median !== null).sort((a, b) => b.median - a.median);
  const lines = medians.map((kind, place) => [
    s("line", { x1: LEFT, x2: width - RIGHT, y1: y(kind.median), y2: y(kind.median), stroke: kind.color, "stroke-width": 1.5, "stroke-dasharray": "6 4" }),
    s("text", { class: "over", x: LEFT + 4, y: y(kind.median) + (place ? 15 : -6) }, `median ${seconds(kind.median)}`),
  ]);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label },
    marks.map((mark) => s("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) })),
    marks.map((mark) => s("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, mark < 1 ? seconds(mark) : `${mark} s`)),
    timeAxis(from, to, x, bottom), dots, lines);
  const rows = points.slice(-60).reverse().map((p) => [clock(p.at), seconds(p.seconds), count(p.tokens), percent(p.recalled)]);
  put(box, svg, table("Requests", ["ended", "first token after", "prompt tokens", "recalled"], rows));
}

// heat: {layers: [name], shares: [[share or null]]}, columns from the start of the context to its end
export function heatMap(box, heat, label) {
  const rows = heat.shares.length, columns = heat.shares[0].length;
  const width = Math.max(280, box.clientWidth);
  const tall = Math.max(5, Math.min(22, Math.floor(240 / rows)));
  const height = TOP + rows * tall + BOTTOM + 26;
  const wide = (width - LEFT - RIGHT) / columns;
  const most = Math.max(...heat.shares.flat().map((share) => share ?? 0), 1e-9);
  const color = (share) => `color-mix(in oklab, var(--heat-1) ${(100 * Math.sqrt(share / most)).toFixed(1)}%, var(--heat-0))`;
  const place = (column) => `${percent(column / columns)} to ${percent((column + 1) / columns)} of the context`;
  const cells = heat.shares.flatMap((line, row) => line.map((share, column) => s("rect", {
    x: (LEFT + column * wide).toFixed(2), y: TOP + row * tall, width: (wide - 1).toFixed(2), height: tall - 1, rx: 1.5,
    style: { fill: share === null ? "var(--track)" : color(share) },
    onpointermove: (event) => showTip(event, `layer ${heat.layers[row]}`, [
      [place(column), ""], ["blocks chosen", share === null ? "none to choose from" : percent(share)],
    ]),
    onpointerleave: hideTip,
  })));
  const every = Math.ceil(rows / Math.floor(240 / 16));
  const base = TOP + rows * tall;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, cells,
    heat.layers.map((name, row) => row % every ? null : s("text", { x: LEFT - 8, y: TOP + row * tall + tall / 2 + 4, "text-anchor": "end" }, name)),
    s("text", { x: LEFT, y: base + 16 }, "start of the context"),
    s("text", { x: width - RIGHT, y: base + 16, "text-anchor": "end" }, "end"),
    s("text", { x: LEFT, y: base + 40 }, "chosen: 0 %"),
    [...Array(20).keys()].map((i) => s("rect", { x: LEFT + 76 + i * 7, y: base + 31, width: 7, height: 10, style: { fill: color((i / 19) * most) } })),
    s("text", { x: LEFT + 76 + 146, y: base + 40 }, percent(most)));
  const lines = heat.shares.map((line, row) => [heat.layers[row], ...line.map((share) => share === null ? "–" : percent(share))]);
  put(box, svg, table("Share of the blocks chosen, from the start of the context to its end", ["layer", ...heat.shares[0].map((_, i) => percent(i / columns))], lines));
}

// values: shares of 1, or null
export function spark(times, values, from, to, color, label) {
  const width = 400, height = 34;
  const x = (at) => ((at - from) / Math.max(1, to - from)) * width;
  const points = times.map((at, i) => values[i] === null ? null : `${x(at).toFixed(1)},${(height - values[i] * height).toFixed(1)}`).filter((point) => point);
  if (points.length < 2) return null;
  const first = points[0].split(",")[0], last = points.at(-1).split(",")[0];
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("path", { d: `M${first},${height}L${points.join("L")}L${last},${height}Z`, fill: color, "fill-opacity": 0.16 }),
    s("path", { d: `M${points.join("L")}`, fill: "none", stroke: color, "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }));
}
