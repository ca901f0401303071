import {
  ago, badge, bars, bytes, digest, draw, drawing, el, follow, lines, now, span, svg, table,
} from "./kit.js";

const ROWS = 12;
const LEVEL = {
  "away": "look", "excluded": "bad", "declined": "look", "ready": "good", "in the sum": "good",
};
const PHASES = [["waiting", "waiting"], ["training", "training"], ["pinging", "checking which sites respond"], ["aggregation", "aggregation"], ["done", "done"]];
let all = false;

const named = (told) => (row) => Object.fromEntries(told.columns.map((name, place) => [name, row[place]]));

function verdict(told) {
  const { level, sentence, remarks } = told.health;
  document.getElementById("verdict").className = `panel verdict ${level}`;
  document.getElementById("sentence").textContent = sentence;
  draw("remarks", remarks, () =>
    remarks.length ? remarks.map((one) => el("li", { class: one.level }, one.text)) : el("li", {}, "No problems."));
  document.title = `${level === "good" ? "" : level === "bad" ? "(!) " : "(?) "}${told.now.completed}/${told.now.planned} · ${told.about.run}`;
}

function progress(data, width) {
  const { phase, completed, planned, attempt, checking, deadline, end } = data;
  const done = (width * Math.min(1, completed / planned)).toFixed(1);
  const bar = drawing(`${completed} of ${planned} rounds are published`, width, 10, [
    svg("rect", { width, height: 10, rx: 2, class: "rail" }), svg("rect", { width: done, height: 10, rx: 2, class: "c0" }),
  ]);
  const step = (name) => (name === "aggregation" && attempt
    ? `: attempt ${attempt.number}, ${attempt.step}, at least ${attempt.threshold} of ${attempt.members}` : "");
  const facts = [`${completed} of ${planned} rounds published`];
  if (checking) facts.push(`the sum of round ${checking} is being checked`);
  return [bar,
    el("ol", { class: "phases" }, PHASES.map(([name, word]) =>
      el("li", { "aria-current": name === phase ? "step" : null }, word, name === phase ? step(name) : ""))),
    el("p", { class: "soft" }, facts.join(", "), ".", deadline && phase === "training"
      ? [" A hospital that is not ready by the deadline, ", ago(deadline), ", is left out."] : "",
    end > now() ? [" At the pace of the newest rounds the run ends on ", day(end), "."] : "")];
}

const day = (ms) => new Date(ms).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

/** Since when a hospital is waited for: since it was last heard of, or else the run began, or since a deadline that it has missed. */
function lateSince(site, { began, deadline }) {
  if (site.state === "away") return site.seen || began;
  return site.state === "training" && deadline && deadline < now() ? deadline : null;
}

const sites = ({ sites: data, ...since }) => table("Hospitals and their state",
  ["hospital", "state", { name: "late since", wide: true }, { name: "last contact", wide: true }, { name: "received from it", number: true, wide: true }, { name: "sent to it", number: true, wide: true }],
  data.map((site) => [
    site.name,
    [badge(site.state, LEVEL[site.state] ?? "none"), site.excluded ? el("span", { class: "soft" }, ` ${site.excluded}`) : "",
      site.pause ? el("span", { class: "soft" }, ` left out of the next ${site.pause} cohorts`) : ""],
    lateSince(site, since) ? ago(lateSince(site, since)) : "–",
    ago(site.seen),
    site.connected ? bytes(site.in) : "–",
    site.connected ? bytes(site.out) : "–",
  ]));

const RUNS = { over: ["over", "none"], now: ["in force", "good"], waits: ["waits", "none"] };

/** A column for the best round, where the runs have one. */
function runs(data) {
  const best = data.some((run) => run.best);
  return table("Runs of this study", [
    "run", "state", { name: "rounds published", wide: true }, { name: "from", wide: true }, { name: "to", wide: true },
    ...(best ? [{ name: "best round", number: true }] : []),
  ], data.map((run) => [
    run.run,
    badge(...RUNS[run.state]),
    run.planned ? `${run.published ?? 0} of ${run.planned}` : run.published ?? "–",
    run.began ? day(run.began) : "–",
    run.ended ? day(run.ended) : run.end > now() ? `about ${day(run.end)}` : "–",
    ...(best ? [run.best ?? "–"] : []),
  ]));
}

function members({ rounds, names }, width) {
  if (!rounds.length) return el("p", { class: "soft" }, "No attempt yet.");
  const left = Math.min(150, 16 + 7.2 * Math.max(...names.map((name) => name.length)));
  const room = Math.max(4, Math.floor((width - left) / 15));
  const recent = rounds.slice(-room);
  const step = Math.min(26, (width - left) / recent.length);
  const height = 20 * names.length + 24;
  const parts = names.flatMap((name, row) => [
    svg("text", { x: left - 12, y: 20 * row + 15, "text-anchor": "end" }, name.length > 20 ? `${name.slice(0, 19)}…` : name),
    ...recent.flatMap((round, place) => {
      const kind = ["in", "out", "planned"].find((one) => round[one].includes(name)) ?? "absent";
      const at = { x: (left + place * step + 1.5).toFixed(1), y: 20 * row + 4, width: (step - 3).toFixed(1), height: 14 };
      return svg("rect", { ...at, rx: 2, class: kind }, svg("title", {}, `${name}, round ${round.round}: ${WORDS[kind]}`));
    }),
  ]);
  const every = Math.ceil(30 / step);
  recent.forEach((round, place) => {
    if (place % every) return;
    parts.push(svg("text", { x: left + (place + 0.5) * step, y: height - 4, "text-anchor": "middle" }, round.round));
  });
  return el("figure", {}, drawing("Which hospital was in which sum", width, height, parts),
    el("figcaption", {}, "Last attempt of each round: filled, in the sum; red, left out; outlined, in progress; faint, not planned."));
}
const WORDS = { in: "in the sum", out: "left out", planned: "in progress", absent: "not planned" };

const figures = (key, words, [from, to]) => ({ rows, weights }, width) => {
  const perImage = weights === "samples";
  const chosen = rows.filter((row) => row.weight && row.outcome === "published" && row[key] !== null);
  if (!chosen.length) return el("p", { class: "soft" }, "No sum with this figure yet.");
  const points = chosen.map((row) => [row.number, perImage ? row[key] / row.weight : row[key]]);
  const title = perImage ? words[0] : words[1];
  return el("figure", {}, lines(title, [{ points }], { width, from: perImage ? from : null, to: perImage ? to : null }),
    el("figcaption", {}, `${title}, by round`));
};
const loss = figures("loss", ["Training loss per image", "Training loss, summed over hospitals"], [null, null]);
const hits = figures("hits", ["Training accuracy", "Correctly classified training images, summed over hospitals"], [0, 1]);

function scores(told, width) {
  if (!told) return null;
  if (!told.summed) return el("p", { class: "soft" }, "Scores are not summed: too few hospitals consent.");
  if (!told.models.length) return el("p", { class: "soft" }, "No model has been scored yet.");
  const title = `Mean ${told.figure} score on validation images`;
  const best = told.models.find((one) => one.round === told.best);
  const spread = best.spread === null ? "" : `, spread ${best.spread.toFixed(3)}`;
  return el("figure", {}, lines(title, [{ points: told.models.map((one) => [one.round, one.mean]) }], { width }),
    el("figcaption", {}, `${title}, by the round that gave the model, over the hospitals that consent. `,
      el("strong", {}, `Best so far: round ${best.round}, ${best.mean.toFixed(3)}${spread}, ${best.hospitals} hospitals.`),
      " One lying hospital can choose it."));
}

function aborts(data) {
  if (!data.length) return el("p", { class: "soft" }, "None.");
  const rows = data.slice(0, all ? data.length : 8).map((one) => [
    `round ${one.round}`,
    one.attempt ? `attempt ${one.attempt}` : "lost",
    [one.reason, one.missing.length ? el("span", { class: "soft" }, ` ${one.missing.join(", ")}`) : ""],
    ago(one.at),
  ]);
  return table("Attempts and rounds that failed", ["round", "what", { name: "why", wide: true }, "when"], rows);
}

function rounds({ rows, shownAll }) {
  const newest = rows.slice().reverse().slice(0, shownAll ? 200 : ROWS);
  const made = table("Rounds, newest first", [
    "round", "outcome", "hospitals", { name: "duration", number: true }, { name: "bytes in", number: true },
    { name: "bytes out", number: true }, { name: "model", wide: true }, "sum",
  ], newest.map((row) => [
    row.number,
    row.outcome === "published" ? badge("published", "good") : row.outcome ? badge(row.outcome, "look") : badge("in progress", "none"),
    row.survivors ? `${row.survivors} of ${row.members}` : row.members ? `– of ${row.members}` : "–",
    row.closed ? span(row.closed - row.opened) : span(now() - row.opened),
    bytes(row.bytes_in), bytes(row.bytes_out), digest(row.model, 16),
    row.model ? (row.checked ? badge("checked", "good") : badge("not checked", "none")) : "–",
  ]));
  if (rows.length <= ROWS) return made;
  const button = el("button", { type: "button" }, shownAll ? "show fewer" : `show more of ${rows.length}`);
  button.addEventListener("click", () => { all = !all; show(last); });
  return [made, button];
}

/** Witnesses of the whole log first; those that hold less of it are named with how much. */
function witnesses({ size, witnesses: seen }) {
  const held = [...new Set(seen.map((one) => Math.min(size, one.size)))].sort((one, two) => two - one);
  return held.map((least) => {
    const names = seen.filter((one) => Math.min(size, one.size) === least).map((one) => one.name).join(", ");
    return least < size ? `${names} up to ${least.toLocaleString("en")}` : names;
  }).join("; ");
}


const logs = (data) => table("Checkpoints of privacy logs", [
  "log", { name: "checkpoint covers", number: true }, { name: "not witnessed yet", wide: true }, { name: "root", wide: true },
  { name: "witnessed by", wide: true }, "newest",
], data.map((one, place) => [
  place ? one.log : `${one.log} (this one)`,
  one.size ? `${one.size.toLocaleString("en")} entries` : "–",
  one.gap ? `${one.gap.toLocaleString("en")} entries` : one.size ? badge("none", "good") : "–",
  digest(one.root, 16),
  one.witnesses.length ? witnesses(one) : badge("nobody yet", "look"),
  ago(Math.max(0, ...one.witnesses.map((seen) => seen.at ?? 0))),
]));

const traffic = (word) => (data) => [
  el("p", { class: "soft" }, `${word}: ${bytes(data.reduce((sum, row) => sum + row[1], 0))}`),
  bars(word, data.slice(0, 7).map(([name, count]) => [name, count, bytes(count)])),
];

let last = null;

function show(told) {
  last = told;
  const rows = told.rounds.map(named(told));
  const { about } = told;
  document.getElementById("title").textContent = `${about.federation} · ${about.run}`;
  document.getElementById("about").textContent = `coordinator “${about.coordinator}”, ${about.method} on ${about.architecture}, manifest ${about.manifest}${about.privacy ? ", under differential privacy" : ""}`;
  document.getElementById("foot").textContent = `Lazaret ${about.version}. Read-only: nothing can be changed from here.`;
  verdict(told);
  draw("progress", told.now, progress);
  const { began } = told.runs.find((run) => run.state === "now");
  draw("sites", { sites: told.sites, deadline: told.now.deadline, began }, sites);
  draw("runs", told.runs.map((run) => (run.state === "now" ? { ...run, end: told.now.end } : run)), runs);
  draw("members", { rounds: told.members, names: told.sites.map((site) => site.name) }, members);
  draw("loss", { rows, weights: about.weights }, loss);
  draw("hits", { rows, weights: about.weights }, hits);
  draw("scores", told.scores, scores);
  draw("aborts", told.aborts, aborts);
  draw("rounds", { rows, shownAll: all }, rounds);
  draw("logs", told.logs, logs);
  draw("traffic-in", told.traffic.in, traffic("from the hospitals"));
  draw("traffic-out", told.traffic.out, traffic("to the hospitals"));
}

follow("state.json", show);
