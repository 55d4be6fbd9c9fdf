// The prefixes that are cached, as a tree: model, tenant, then blocks that begin alike.

import { age, bytes, count, h, replace } from "./dom.js";

const open = new Set();

function bar(node, most) {
  const whole = node.host_bytes + node.disk_bytes || 1;
  const wide = Math.max(2, 100 * Math.sqrt((node.host_bytes + node.disk_bytes) / (most || 1)));
  return h("span", { class: "bar", title: `host ${bytes(node.host_bytes)}, disk ${bytes(node.disk_bytes)}` },
    h("span", { style: { width: `${(wide * node.host_bytes) / whole}%`, background: "var(--host)" } }),
    h("span", { style: { width: `${(wide * node.disk_bytes) / whole}%`, background: "var(--disk)" } }));
}

function item(node, level, most, redraw) {
  const name = node.id;
  const shown = open.has(name) !== (level < 3 && node.children.length > 0);
  const twist = node.children.length
    ? h("button", {
        class: "twist", type: "button", "aria-expanded": String(shown), "aria-label": `Details of ${node.label}`,
        onclick: () => { if (!open.delete(name)) open.add(name); redraw(name); },
        "data-name": name,
      }, shown ? "▾" : "▸")
    : h("span", {});
  return h("li", {},
    h("div", { class: level < 2 ? "row group" : "row" }, twist,
      h("span", { class: "label", title: node.title }, node.label, node.code ? h("code", {}, node.code) : null),
      bar(node, most),
      h("span", { class: "size" }, bytes(node.host_bytes + node.disk_bytes)),
      h("span", { class: "age", title: "since the last use" }, age(node.age_s))),
    shown && node.children.length
      ? h("ul", {}, node.children.map((child) => item(child, level + 1, most, redraw)),
          node.hidden ? h("li", { class: "muted row" }, h("span", {}), `and ${count(node.hidden)} smaller`) : null)
      : null);
}

export function drawTree(box, roots) {
  const most = Math.max(...roots.map((root) => root.host_bytes + root.disk_bytes), 1);
  const redraw = (focus) => {
    const list = h("ul", { class: "tree" },
      h("li", {}, h("div", { class: "row columns", "aria-hidden": "true" }, h("span", {}), h("span", {}, "model, tenant, prefix"), h("span", {}, "host, disk"), h("span", {}, "bytes"), h("span", {}, "age"))),
      roots.map((root) => item(root, 0, most, redraw)));
    const scrolled = box.querySelector(".tree")?.scrollTop ?? 0;
    replace(box, list);
    list.scrollTop = scrolled;
    if (focus) [...box.querySelectorAll(".twist")].find((each) => each.dataset.name === focus)?.focus();
  };
  const focused = document.activeElement?.dataset?.name;
  redraw(focused);
}
