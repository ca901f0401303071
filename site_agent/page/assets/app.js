import { ago, bars, bytes, digest, draw, drawing, el, follow, legend, lines, svg } from "./kit.js";

const SHAPES = ["circle", "square", "diamond", "triangle", "cross", "ring", "bar", "wedge"];
const CLASSES = {
  "masked-vector": "masked vector", "control": "protocol messages", "public-key": "public keys",
  "sealed-share": "sealed shares", "mask-share": "mask shares", "checkpoint": "log checkpoints",
};

const none = (text) => el("p", { class: "soft" }, text);
const className = (told, place) => told?.names?.[place] ?? `class ${place}`;

function verdict({ level, sentence, remarks }, about) {
  document.getElementById("verdict").className = `panel verdict ${level}`;
  document.getElementById("sentence").textContent = sentence;
  draw("remarks", remarks, () =>
    remarks.length ? remarks.map((one) => el("li", { class: one.level }, one.text)) : el("li", {}, "No problems."));
  document.title = `${level === "good" ? "" : level === "bad" ? "(!) " : "(?) "}${about.site ?? "site"}`;
}

const facts = ({ about, egress }) => el("dl", { class: "facts" }, [
  ["agent", about.running === undefined ? "–" : !about.running ? "not running" : about.connected ? "running, connected" : "running, not connected"],
  ["round accepted", about.round === undefined ? "–" : `${about.round} of ${about.rounds_planned}`],
  ["model", digest(about.model, 16)],
  ["verified", about.certified === undefined ? "–" : about.certified ? "yes" : "not yet"],
  ["certificates end", about.certificate_ends_ms ? ago(about.certificate_ends_ms) : "–"],
  ["log", `${egress.entries.toLocaleString("en")} entries`],
  ["newest entry", ago(egress.newest)],
].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

function today(egress, width) {
  const sum = egress.today.reduce((total, row) => total + row[2], 0);
  const days = egress.days.map(([day, size], place) => ({ day, size, place }));
  return [
    el("p", { class: "figure" }, bytes(sum), el("span", { class: "soft" }, ` on ${egress.day}, ${bytes(egress.total)} in all`)),
    egress.today.length
      ? bars("Bytes sent today, by kind", egress.today.map(([name, count, size]) =>
        [`${CLASSES[name] ?? name} (${count})`, size, bytes(size)]))
      : none("Nothing."),
    days.length > 1 ? el("figure", {}, columns("Bytes by day", days.map((one) => [one.day.slice(5), one.size]), width)) : null,
    el("p", { class: "soft" }, egress.blocked
      ? `${egress.blocked} messages were blocked by the egress filter.` : "The egress filter has never blocked a message.",
    " Read from this site's own log; privacy-audit verify proves that nothing is missing from it."),
  ];
}

function columns(title, rows, width, height = 90) {
  const most = Math.max(1, ...rows.map((row) => row[1]));
  const step = Math.min(60, width / rows.length);
  const parts = rows.flatMap(([name, size], place) => {
    const tall = Math.max(1, (size / most) * (height - 34));
    const middle = (place + 0.5) * step;
    return [
      svg("rect", { x: (place * step + 3).toFixed(1), y: (height - 18 - tall).toFixed(1), width: (step - 6).toFixed(1), height: tall.toFixed(1), class: "c0" },
        svg("title", {}, `${name}: ${bytes(size)}`)),
      svg("text", { x: middle.toFixed(1), y: height - 4, "text-anchor": "middle" }, rows.length > 8 && place % 2 ? "" : name),
    ];
  });
  return drawing(title, width, height, parts);
}

function privacy(told, width) {
  if (!told) return none("This site has no privacy ledger: the run does not use differential privacy.");
  if (told.problem) return el("p", { class: "bad" }, told.problem);
  const share = Math.min(1, told.epsilon / told.cap);
  const points = told.series.map((row, place) => [place + 1, row[2]]);
  return [
    el("p", { class: "figure" }, `ε ${told.epsilon.toFixed(3)}`,
      el("span", { class: "soft" }, ` of at most ${told.cap} for each ${told.unit}, δ ${told.delta}`)),
    drawing(`${Math.round(100 * share)} percent of the budget is spent`, width, 10, [
      svg("rect", { width, height: 10, rx: 2, class: "rail" }),
      svg("rect", { width: (width * share).toFixed(1), height: 10, rx: 2, class: share > 0.9 ? "full" : "c0" })]),
    el("figure", {}, lines("Epsilon after each reservation", [{ points }], { width, height: 150, from: 0, to: told.cap }),
      el("figcaption", {}, `Ledger of ${told.population}, after each reservation. Reserved privacy counts as spent.`)),
  ];
}

function curves(rows, width) {
  const pick = (side, name) => rows.filter((row) => row[side] && row[side][name] !== null).map((row) => [row.round, row[side][name]]);
  const all = [["validation", "bacc", "balanced accuracy, validation"], ["test", "bacc", "balanced accuracy, test"],
    ["test", "bauc", "balanced AUC, test"]].map(([side, name, word]) => ({ name: word, points: pick(side, name) }));
  const series = all.filter((one) => one.points.length);
  if (!series.length) return none("No round has been evaluated yet.");
  return el("figure", {}, lines("Local figures after each round", series, { width, height: 220, from: 0, to: 1 }),
    legend(series.map((one) => one.name)),
    el("figcaption", {}, "This site's own model on its own images, after each round."));
}

function classes(told) {
  if (!told) return none("The agent records this when it opens the data.");
  const sides = ["train", "validation", "test"].filter((side) => told[side]);
  const rows = told.names.map((name, place) => {
    const parts = sides.map((side) => told[side][place]);
    return [name, told.train[place], parts.join(" / ")];
  });
  return [bars("Images of each class", rows), none(`Images for ${sides.join(" / ")}; bars are those for training.`)];
}

function confusion({ told, names }) {
  if (!told) return none("No round has been evaluated yet.");
  const label = (place) => className(names, place);
  const rows = told.matrix.map((row, place) => ({ row, place, sum: row.reduce((one, two) => one + two, 0) }));
  return [el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "confusion matrix" },
    el("table", { class: "matrix" },
      el("caption", { class: "hidden" }, "True classes by predicted classes"),
      el("thead", {}, el("tr", {}, el("td", {}), told.matrix.map((_, place) => el("th", { scope: "col" }, label(place))))),
      el("tbody", {}, rows.map(({ row, place, sum }) => el("tr", {}, el("th", { scope: "row" }, label(place)),
        row.map((count, column) => el("td", {
          class: `s${sum ? Math.min(5, Math.ceil((5 * count) / sum)) : 0}${column === place ? " right" : ""}`,
        }, count))))))),
  none(`Rows are true classes, columns are predictions; ${told.side} images after round ${told.round}.`)];
}

function mark(shape, x, y, attributes) {
  const r = 5;
  const path = {
    square: `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`, diamond: `M${x},${y - r - 1}l${r + 1},${r + 1}l${-r - 1},${r + 1}l${-r - 1},${-r - 1}z`,
    triangle: `M${x},${y - r - 1}l${r + 1},${2 * r}h${-2 * r - 2}z`, wedge: `M${x},${y + r + 1}l${r + 1},${-2 * r}h${-2 * r - 2}z`,
    cross: `M${x - r},${y - r}l${2 * r},${2 * r}M${x - r},${y + r}l${2 * r},${-2 * r}`, bar: `M${x - r - 1},${y}h${2 * r + 2}`,
  }[shape];
  return path ? svg("path", { d: path, ...attributes }) : svg("circle", { cx: x, cy: y, r, ...attributes });
}

function prototypes({ told, names }, width) {
  if (!told) return none("There are no prototypes yet, or the method makes none.");
  const height = Math.min(360, Math.max(220, Math.round(width * 0.7)));
  const xs = told.points.map((point) => point[0]);
  const ys = told.points.map((point) => point[1]);
  const reach = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys), 1e-6);
  const room = Math.min(width, height) - 40;
  const middle = (values) => (Math.max(...values) + Math.min(...values)) / 2;
  const x = (value) => Number((width / 2 + ((value - middle(xs)) / reach) * room).toFixed(1));
  const y = (value) => Number((height / 2 - ((value - middle(ys)) / reach) * room).toFixed(1));
  const parts = [svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: height - 1, class: "frame" })];
  told.points.forEach((point, place) => {
    const owner = told.owners[place];
    const shape = SHAPES[owner % SHAPES.length];
    const node = mark(shape, x(point[0]), y(point[1]), { class: `proto p${owner % 8}${shape === "ring" ? " ring" : ""}` });
    node.append(svg("title", {}, className(names, owner)));
    parts.push(node);
  });
  const owners = [...new Set(told.owners)];
  const key = owners.map((owner) => el("li", {}, svg("svg", { width: 16, height: 14, viewBox: "0 0 16 14", "aria-hidden": "true" },
    mark(SHAPES[owner % SHAPES.length], 8, 7, { class: `proto p${owner % 8}${SHAPES[owner % 8] === "ring" ? " ring" : ""}` })), ` ${className(names, owner)}`));
  const share = Math.round(100 * (told.shares[0] + told.shares[1]));
  return el("figure", {}, drawing("Prototypes on the plane in which they differ most", width, height, parts),
    el("ul", { class: "key" }, key),
    el("figcaption", {}, `${told.points.length} prototypes after round ${told.round}; this plane holds ${share} % of their variance.`));
}

function show(told) {
  const { about } = told;
  document.getElementById("title").textContent = about.site ? `${about.site} in ${about.federation}` : "Lazaret site";
  document.getElementById("about").textContent = about.run ? `run ${about.run}, manifest ${about.manifest_version}` : "";
  verdict(told.health, about);
  draw("now", { about, egress: told.egress }, facts);
  draw("today", told.egress, today);
  draw("privacy", told.privacy, privacy);
  draw("curves", told.curves, curves);
  draw("classes", told.classes, classes);
  draw("confusion", { told: told.confusion, names: told.classes }, confusion);
  draw("prototypes", { told: told.prototypes, names: told.classes }, prototypes);
}

follow("state.json", show);
