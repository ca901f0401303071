// What both pages are built with. Everything that comes from data becomes text or a number, never markup.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const el = (name, attributes, ...children) => build(document.createElement(name), attributes, children);
export const svg = (name, attributes, ...children) => build(document.createElementNS(SVG, name), attributes, children);

// Numbers and times for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

export function span(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 100) return `${seconds} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
let offset = 0; // the other side's clock less ours

export const now = () => Date.now() + offset;

/** A time that keeps saying how long ago it is. */
export function ago(at) {
  if (!at) return el("span", { class: "soft" }, "never");
  const node = el("time", { datetime: new Date(at).toISOString(), title: CLOCK.format(at), "data-at": at });
  tell(node);
  return node;
}

function tell(node) {
  const passed = now() - Number(node.dataset.at);
  node.textContent = passed < 0 ? `in ${span(-passed)}` : `${span(passed)} ago`;
}

export function digest(value, length = 12) {
  if (!value) return el("span", { class: "soft" }, "–");
  return el("code", { title: value }, value.length > length ? `${value.slice(0, length)}…` : value);
}

export const badge = (word, level) => el("span", { class: `badge ${level}` }, word);

/** A table whose cells carry the heads of their columns, for screens on which each row becomes a card: first and second
 * cell on its first line, `wide` ones on lines of their own. */
export function table(caption, heads, rows) {
  const columns = heads.map((head) => (typeof head === "string" ? { name: head } : head));
  const kind = ({ number, wide }) => [number && "number", wide && "wide"].filter(Boolean).join(" ") || null;
  const cell = (content, place) =>
    el(place ? "td" : "th", {
      scope: place ? null : "row", "data-label": columns[place].name, class: kind(columns[place]),
    }, el("span", {}, content));
  return el("table", { class: "cards" },
    el("caption", { class: "hidden" }, caption),
    el("thead", {}, el("tr", {}, columns.map((head) =>
      el("th", { scope: "col", class: kind(head) }, head.name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))));
}

// Charts.

export function ticks(low, high, count = 4) {
  const reach = high - low || Math.abs(high) || 1;
  const rough = reach / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

const short = (value) => String(Number(value.toPrecision(4)));

/** Lines over rounds. `series`: [{name, points: [[x, y], ...]}]; the first four are told apart by colour and dash. */
export function lines(title, series, { width, height = 190, from = null, to = null, unit = "" }) {
  const all = series.flatMap((one) => one.points);
  if (!all.length) return el("p", { class: "soft" }, "No data yet.");
  const xs = all.map((point) => point[0]);
  const ys = all.map((point) => point[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const low = from ?? Math.min(...ys);
  const high = to ?? Math.max(...ys);
  const pad = from === null && low === high ? Math.abs(low) * 0.1 || 1 : 0;
  const box = { left: 46, right: width - 12, top: 12, bottom: height - 26 };
  const scale = (value, a, b, c, d) => c + ((value - a) / (b - a || 1)) * (d - c);
  const x = (value) => (x0 === x1 ? (box.left + box.right) / 2 : scale(value, x0, x1, box.left, box.right)).toFixed(1);
  const y = (value) => scale(value, low - pad, high + pad, box.bottom, box.top).toFixed(1);
  const parts = [];
  for (const value of ticks(low - pad, high + pad)) {
    parts.push(svg("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value), class: "grid" }));
    parts.push(svg("text", { x: box.left - 8, y: Number(y(value)) + 4, "text-anchor": "end" }, short(value) + unit));
  }
  for (const value of ticks(x0, x1, Math.max(2, Math.min(8, Math.floor(width / 90)))).filter(Number.isInteger)) {
    parts.push(svg("text", { x: x(value), y: height - 8, "text-anchor": "middle" }, value));
  }
  series.forEach((one, place) => {
    const points = one.points.map((point) => `${x(point[0])},${y(point[1])}`);
    if (points.length > 1) parts.push(svg("polyline", { points: points.join(" "), class: `curve c${place}` }));
    if (points.length) {
      const [cx, cy] = points[points.length - 1].split(",");
      parts.push(svg("circle", { cx, cy, r: 3.5, class: `dot c${place}` }));
    }
  });
  return drawing(title, width, height, parts);
}

export function drawing(title, width, height, parts) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "chart" },
    svg("title", {}, title), parts);
}

/** Names of lines with the marks they are drawn with. */
export const legend = (names) =>
  el("ul", { class: "legend" }, names.map((name, place) => el("li", { class: `c${place}` }, name)));

/** Bars by size: [[name, value, text], ...]. */
export function bars(caption, rows) {
  const most = Math.max(1, ...rows.map((row) => row[1]));
  return el("table", { class: "bars" }, el("caption", { class: "hidden" }, caption), el("tbody", {}, rows.map((row) =>
    el("tr", {}, el("th", { scope: "row", title: row[0] }, row[0]),
      el("td", { class: "bar" }, svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width: ((100 * row[1]) / most).toFixed(2), height: 10, class: "c0" }))),
      el("td", { class: "number" }, row[2] ?? row[1])))));
}

// The page as it changes.

const shown = new Map();

/** Draw a part of the page again if what it shows, or the room it has, is another than last time. */
export function draw(id, data, render) {
  const place = document.getElementById(id);
  const width = Math.max(240, Math.floor(place.clientWidth));
  const key = `${width} ${JSON.stringify(data)}`;
  if (shown.get(id) === key) return;
  shown.set(id, key);
  const made = render(data, width);
  place.replaceChildren(...[made].flat(Infinity).filter(Boolean));
}

/** Ask again and again, and say so when no answer comes: an old picture must not pass for a new one. */
export function follow(url, show, every = 1000) {
  let tag = null;
  let value = null;
  let failedSince = null;
  const alive = document.getElementById("alive");
  const state = (word, level) => {
    if (alive.textContent !== word) alive.textContent = word;
    alive.className = `alive ${level}`;
    document.body.classList.toggle("stale", level === "bad");
  };
  async function ask() {
    try {
      const answer = await fetch(url, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status !== 304 && !answer.ok) throw new Error(answer.statusText);
      const told = Date.parse(answer.headers.get("Date"));
      if (Math.abs(told - Date.now() - offset) > 2000) offset = told - Date.now();
      if (answer.status === 200) {
        value = await answer.json();
        tag = answer.headers.get("ETag");
      }
      failedSince = null;
      show(value);
      state("page up to date", "good");
    } catch (error) {
      failedSince ??= Date.now();
      state(`no answer for ${span(Date.now() - failedSince)}: these figures are old`, "bad");
      if (!(error instanceof TypeError)) console.warn(error.message);
    }
    document.querySelectorAll("time[data-at]").forEach(tell);
    setTimeout(ask, document.hidden ? 5 * every : every);
  }
  addEventListener("resize", () => value && show(value));
  ask();
}
