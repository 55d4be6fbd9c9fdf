// Drawings in SVG, made anew with every new figure. Each has a table of the same numbers.

import { clock, count, h, hideTip, percent, replace, s, seconds, showTip } from "./dom.js";

const LEFT = 58, RIGHT = 10, TOP = 24, BOTTOM = 28;

export const note = (text) => h("p", { class: "note" }, text);

function ticks(most, whole = false, wanted = 4) {
  const rough = Math.max(most, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  if (whole) step = Math.max(1, step);
  const found = [];
  for (let i = 0; found.length < 2 || found.at(-1) < most * 0.999; i += 1) found.push(i * step);
  return found;
}

function timeAxis(from, to, x, bottom, width) {
  const span = to - from;
  const room = (step) => Math.min(8, Math.floor((width - LEFT - RIGHT) / (step < 60 ? 64 : 48))); // labels side by side
  const step = [10, 30, 60, 120, 300, 600].find((n) => span / n <= room(n)) ?? 600;
  const marks = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    if (x(at) < LEFT + 12) continue;
    const label = step < 60 ? clock(at) : clock(at).slice(0, 5);
    marks.push(s("text", { x: x(at), y: bottom + 20, "text-anchor": "middle" }, label));
  }
  return [s("text", { x: LEFT - 8, y: bottom + 20, "text-anchor": "end" }, step < 60 ? "h:m:s" : "h:min"), marks];
}

// A frame of two axes with their units: {svg parts, x, y}. scale: {log, format, unit, whole}
function frame(box, from, to, values, scale, tall) {
  const width = Math.max(280, box.clientWidth), height = tall, bottom = height - BOTTOM;
  const x = (at) => LEFT + ((at - from) / Math.max(1, to - from)) * (width - LEFT - RIGHT);
  let marks, y;
  if (scale.log) {
    const low = Math.floor(Math.log10(Math.max(1e-4, Math.min(...values) * 0.95)));
    const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(1e-3, Math.max(...values) * 1.02))));
    marks = [];
    for (let power = low; power <= high; power += 1) marks.push(10 ** power);
    y = (value) => bottom - ((Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)) * (bottom - TOP);
  } else {
    marks = ticks(Math.max(...values, scale.least ?? 0), scale.whole);
    y = (value) => bottom - (value / marks.at(-1)) * (bottom - TOP);
  }
  const back = [
    marks.map((mark, i) => s("line", { class: i ? "gridline" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) })),
    marks.map((mark) => s("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, scale.format(mark))),
    s("text", { class: "unit", x: 0, y: 11 }, scale.unit),
    timeAxis(from, to, x, bottom, width),
  ];
  return { width, height, bottom, x, y, back };
}

const drawing = (width, height, label, ...parts) =>
  s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, ...parts);

function table(caption, heads, rows) {
  return h("details", { class: "figures" },
    h("summary", {}, "The figures as a table"),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
      h("table", {}, h("caption", { class: "muted" }, caption),
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))))));
}

// Keeps the open table open, where it was, over redraws.
function put(box, svg, figures) {
  const before = box.querySelector("details");
  if (figures && before?.open) figures.open = true;
  const top = before?.querySelector(".scroll").scrollTop ?? 0;
  const focused = before?.contains(document.activeElement) ? document.activeElement.tagName : null;
  replace(box, svg, figures ?? null);
  if (!figures) return;
  figures.querySelector(".scroll").scrollTop = top;
  if (focused) figures.querySelector(focused.toLowerCase())?.focus({ preventScroll: true });
}

// A line that follows the pointer, and the values there.
function crosshair(svg, frame_, from, to, times, tell) {
  const { x, width, bottom } = frame_;
  const cross = s("line", { class: "cross", y1: TOP, y2: bottom, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    if (event.target.tagName === "circle" || !times.length) { cross.setAttribute("visibility", "hidden"); return; }
    const at = from + ((event.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT)) * (to - from);
    let near = 0;
    times.forEach((time, i) => { if (Math.abs(time - at) < Math.abs(times[near] - at)) near = i; });
    for (const end of ["x1", "x2"]) cross.setAttribute(end, x(times[near]));
    cross.setAttribute("visibility", "visible");
    showTip(event, clock(times[near]), tell(near));
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
}

const perSecond = (value) => `${value < 10 && value > 0 ? value.toFixed(1) : count(value)} tokens/s`;

// series: [{label, color, values}], values as tokens a second in the interval that ends at times[i]
export function stacked(box, times, series, label) {
  const from = times[0], to = times.at(-1);
  const sums = times.map((_, i) => series.reduce((sum, one) => sum + one.values[i], 0));
  const fitted = frame(box, from, to, sums, { format: count, unit: "prompt tokens/s", least: 1 }, 240);
  const { x, y, width, height } = fitted;
  const beneath = times.map(() => 0);
  const areas = series.map((one) => {
    const low = [...beneath];
    one.values.forEach((value, i) => { beneath[i] += value; });
    const edge = (heights) => times.map((at, i) => `${x(at).toFixed(1)},${y(heights[i]).toFixed(1)}`);
    const path = `M${edge(beneath).join("L")}L${edge(low).reverse().join("L")}Z`;
    return s("path", { d: path, fill: one.color, "fill-opacity": 0.9, stroke: "var(--card)", "stroke-width": 0.6 });
  });
  const svg = drawing(width, height, label, fitted.back, areas);
  crosshair(svg, fitted, from, to, times, (i) => [...series].reverse().map((one) => [one.label, perSecond(one.values[i]), one.color]));
  const rows = times.map((at, i) => [clock(at), ...series.map((one) => perSecond(one.values[i]))])
    .filter((_, i) => sums[i] > 0).slice(-60).reverse();
  put(box, svg, table("Prompt tokens per second, by source", ["until", ...series.map((one) => one.label)], rows));
}

// The points of a line, in parts where nothing was measured between.
function parts(times, values, x, y) {
  const runs = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (!i || values[i - 1] === null) runs.push([]);
    runs.at(-1).push(`${x(times[i]).toFixed(1)},${y(value).toFixed(1)}`);
  });
  return runs;
}

// A line broken where nothing was measured; lone points are dots.
function trace(times, values, x, y, look) {
  return parts(times, values, x, y).map((run) => run.length > 1
    ? s("path", { d: `M${run.join("L")}`, fill: "none", stroke: look.color, "stroke-width": look.dash ? 1.4 : 2, "stroke-dasharray": look.dash, "stroke-linejoin": "round" })
    : s("rect", { x: run[0].split(",")[0] - 1.5, y: run[0].split(",")[1] - 1.5, width: 3, height: 3, fill: look.color }));
}

// lines: [{label, color, dash, values: [number or null]}] at times; dots: [{at, value, size, color, tip}];
// marks: [{at, text}] at the foot; scale as of frame, with tell: value -> text with its unit
export function plot(box, { times, from, to, lines, dots = [], marks = [], scale, label, caption, tall = 200, figures }) {
  const values = [...lines.flatMap((line) => line.values), ...dots.map((dot) => dot.value)].filter((value) => value !== null);
  const fitted = frame(box, from, to, values.length ? values : [0], scale, tall);
  const { x, y, width, height, bottom } = fitted;
  const svg = drawing(width, height, label, fitted.back,
    dots.map((dot) => s("circle", {
      cx: x(dot.at).toFixed(1), cy: y(dot.value).toFixed(1), r: dot.size, fill: dot.color, "fill-opacity": 0.55, stroke: dot.color,
      onpointermove: (event) => showTip(event, clock(dot.at), dot.tip), onpointerleave: hideTip,
    })),
    lines.map((line) => trace(times, line.values, x, y, line)),
    marks.map((mark) => s("path", { class: "mark", d: `M${x(mark.at)},${bottom - 9}l5,9h-10Z` }, s("title", {}, mark.text))));
  crosshair(svg, fitted, from, to, times, (i) =>
    lines.map((line) => [line.label, line.values[i] === null ? "–" : scale.tell(line.values[i]), line.color]));
  const [heads, rows] = figures ?? [
    ["until", ...lines.map((line) => line.label)],
    times.map((at, i) => [clock(at), ...lines.map((line) => line.values[i] === null ? "–" : scale.tell(line.values[i]))])
      .filter((_, i) => lines.some((line) => line.values[i])).slice(-60).reverse(),
  ];
  put(box, svg, table(caption, heads, rows));
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
  const svg = drawing(width, height, label, s("text", { class: "unit", x: 0, y: 11 }, "layer"), cells,
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
  const y = (share) => height - share * height;
  const foot = (point) => `${point.split(",")[0]},${height}`;
  const runs = parts(times, values, x, y).filter((points) => points.length > 1);
  if (!runs.length) return null;
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    runs.map((points) => [
      s("path", { d: `M${foot(points[0])}L${points.join("L")}L${foot(points.at(-1))}Z`, fill: color, "fill-opacity": 0.16 }),
      s("path", { d: `M${points.join("L")}`, fill: "none", stroke: color, "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }),
    ]));
}
