import { ago, bars, bytes, digest, draw, drawing, el, follow, legend, lines, svg, table } from "./kit.js";

const SHAPES = ["circle", "square", "diamond", "triangle", "cross", "ring", "bar", "wedge"];
const CLASSES = {
  "masked-vector": "masked vector", "control": "protocol messages", "public-key": "public keys",
  "sealed-share": "sealed shares", "mask-share": "mask shares", "checkpoint": "log checkpoints",
};

const none = (text) => el("p", { class: "soft" }, text);
const className = (told, place) => told?.names?.[place] ?? `class ${place}`;
// Where an image may have several labels (`images` is there then), a prototype is of images without a label, or with it.
const ownerName = (told, owner) => (told?.images ? `${owner % 2 ? "" : "no "}${className(told, owner >> 1)}` : className(told, owner));

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
  if (!told) return none(names?.images ? "An image may have several labels: each has a row under Evaluation." : "No round has been evaluated yet.");
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
    node.append(svg("title", {}, ownerName(names, owner)));
    parts.push(node);
  });
  const owners = [...new Set(told.owners)];
  const key = owners.map((owner) => el("li", {}, svg("svg", { width: 16, height: 14, viewBox: "0 0 16 14", "aria-hidden": "true" },
    mark(SHAPES[owner % SHAPES.length], 8, 7, { class: `proto p${owner % 8}${SHAPES[owner % 8] === "ring" ? " ring" : ""}` })), ` ${ownerName(names, owner)}`));
  const share = Math.round(100 * (told.shares[0] + told.shares[1]));
  return el("figure", {}, drawing("Prototypes on the plane in which they differ most", width, height, parts),
    el("ul", { class: "key" }, key),
    el("figcaption", {}, `${told.points.length} prototypes after round ${told.round}; this plane holds ${share} % of their variance.`));
}

// Each class against the others, as the last `site-agent evaluate` found it.

const plural = (unit) => (unit === "study" ? "studies" : `${unit}s`);

function figure(one, name) {
  if (one[name] === null || one[name] === undefined) return "–";
  const bounds = one[`${name}_interval`];
  return bounds ? `${one[name].toFixed(2)} (${bounds[0].toFixed(2)}–${bounds[1].toFixed(2)})` : one[name].toFixed(2);
}

const RATES = [["sensitivity", "sensitivity"], ["specificity", "specificity"], ["ppv", "pos. predictive"], ["npv", "neg. predictive"],
  ["auc", "AUC"], ["pr_auc", "PR-AUC"]];

function findings(told) {
  const heads = ["class", `${plural(told.unit)} with it`, { name: "threshold", number: true }, ...RATES.map(([, name]) => ({ name, number: true }))];
  return table("Each class against the others", heads, told.findings.map((one) => [
    one.name, `${one.units_with_finding} of ${one.units}`, one.operating_point ? one.operating_point.threshold.toFixed(3) : "–",
    ...RATES.map(([key]) => figure(one, key))]));
}

function subgroups(told) {
  const rows = told.findings.flatMap((one) => one.subgroups.map((group) => [
    `${group.column}: ${group.group}`, one.name, `${group.units_with_finding} of ${group.units}`,
    ...["sensitivity", "specificity", "auc"].map((key) => figure(group, key))]));
  if (!rows.length) return null;
  const heads = ["subgroup", "class", { name: `${plural(told.unit)} with it`, number: true },
    ...["sensitivity", "specificity", "AUC"].map((name) => ({ name, number: true }))];
  return [el("h3", {}, "Subgroups"), table("Figures of subgroups", heads, rows)];
}

/** Calibration and decision curve of one class. */
function plots(one, width) {
  if (!one.calibration) return null;
  const room = width > 640 ? Math.floor((width - 34) / 2) : width;
  const percent = (points) => points.map(([x, y]) => [100 * x, y]);
  const share = one.units_with_finding ? Math.max(...one.decision.map((point) => point.all)) : 0;
  const shown = (key) => one.decision.filter((point) => point[key] >= -share / 3).map((point) => [point.threshold, point[key]]);
  const seen = [{ name: "observed", points: percent(one.calibration.map((point) => [point.predicted, point.observed])) },
    { name: "as predicted", points: [[0, 0], [100, 1]] }];
  const decided = [["model", "by the model"], ["all", "everybody treated"]]
    .map(([key, name]) => ({ name, points: percent(shown(key)) })).concat([{ name: "nobody", points: [[0, 0], [100, 0]] }]);
  return el("details", {}, el("summary", {}, one.name), el("div", { class: "two plots" },
    el("figure", {}, lines(`Calibration of ${one.name}`, seen, { width: room, from: 0, to: 1 }), legend(seen.map((each) => each.name)),
      el("figcaption", {}, "Calibration: share that has it, by predicted probability in percent.")),
    el("figure", {}, lines(`Decision curve of ${one.name}`, decided, { width: room }), legend(decided.map((each) => each.name)),
      el("figcaption", {}, "Decision curve: net benefit, by threshold in percent."))));
}

function evaluation(told, width) {
  if (!told) return none("Run site-agent evaluate. It measures the model on this hospital's own held-out images.");
  return [
    told.private ? el("p", { class: "bad" }, "These figures are exact, and epsilon does not cover them. Do not pass them on.") : null,
    told.findings.length ? findings(told) : none("There are no held-out images."),
    subgroups(told),
    told.findings.some((one) => one.calibration) ? el("h3", {}, "Calibration and decision curves") : null,
    told.findings.map((one) => plots(one, width)),
    none(`The ${told.model} model, of round ${told.round}, on the ${told.clinical_side} images. In brackets: 95 % intervals over `
      + `${plural(told.unit)} drawn again. Thresholds were chosen on the validation images. site-agent evaluate --html writes a page with all plots.`),
  ];
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
  draw("evaluation", told.evaluation, evaluation);
  draw("prototypes", { told: told.prototypes, names: told.classes }, prototypes);
}

follow("state.json", show);
