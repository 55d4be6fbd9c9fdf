// Elements, numbers for people, and the one tooltip.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(9).filter((child) => child !== null));
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return Math.round(value).toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0095) return `${(value * 1000).toFixed(1).replace(/\.0$/, "")} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (Number.isInteger(value)) return `${value} s`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export function age(value) {
  if (value < 60) return `${Math.max(0, Math.round(value))} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

export const clock = (unix) =>
  new Date(unix * 1000).toLocaleTimeString("en-GB", { hour12: false });

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// pairs: [[value, weight]]. The value up to which half of the weight lies.
export function median(pairs) {
  const sorted = [...pairs].sort(([a], [b]) => a - b);
  let left = sorted.reduce((all, [, weight]) => all + weight, 0) / 2;
  for (const [value, weight] of sorted) {
    left -= weight;
    if (left <= 0) return value;
  }
  return null;
}

// The value below which a share of those lie that were counted between two states of a histogram,
// straight within a bucket, as Prometheus' histogram_quantile. rows: how many are at most each bound.
export function quantile(share, bounds, rows) {
  const rank = share * rows.at(-1);
  if (!(rank > 0)) return null;
  const i = rows.findIndex((many) => many >= rank);
  const low = i ? bounds[i - 1] : 0, under = i ? rows[i - 1] : 0;
  return bounds[i] === null ? low : low + ((bounds[i] - low) * (rank - under)) / (rows[i] - under);
}

// shape: "square", "round", "line" or "dash"
export const swatch = (color, shape = "square") =>
  h("span", { class: `swatch ${shape}`, style: shape === "dash" ? { color } : { background: color } });

export function legend(list, items) {
  replace(list, items.map(([label, color, shape]) => h("li", {}, swatch(color, shape), label)));
}

const tip = () => document.getElementById("tip");

// items: [label, value, color]
export function showTip(event, when, items) {
  const box = tip();
  replace(box, h("div", { class: "when" }, when), items.map(([label, value, color]) =>
    h("div", { class: "item" }, color ? swatch(color) : null, label, h("b", {}, value))));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, event.clientY - height / 2))}px`;
}
export const hideTip = () => { tip().hidden = true; };
