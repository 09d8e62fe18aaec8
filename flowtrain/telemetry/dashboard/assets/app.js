// The page: fetches what the server says has changed, and hands it to charts, timeline and panels.
//
//   /api/events ── states ──▶ history behind? ──▶ /api/runs/N/columns from the last bucket on ──▶ charts
//                             rest changed?   ──▶ /api/runs ──▶ charts' series, panels

import { Card, options } from "./chart.js";
import { el, get, GONE } from "./dom.js";
import { header, panels, problems, tileNames, tiles } from "./panels.js";
import { Timeline } from "./timeline.js";

const NAMES_A_REQUEST = 150, ABOUT_MS = 2000, RETRY_MS = 3000;
const $ = (id) => document.getElementById(id);
const runs = [], charts = new Map(), picked = new Map();
let timeline = null, aboutAt = 0, aboutLater = null, events = null;

function theme(value) {
  document.documentElement.dataset.theme = value;
  $("theme").textContent = value === "dark" ? "Light" : "Dark";
}

function startTheme() {
  const media = matchMedia("(prefers-color-scheme: dark)");
  let chosen = localStorage.getItem("flowtrain-theme");
  theme(chosen ?? (media.matches ? "dark" : "light"));
  const redraw = () => { options.restyle(); timeline?.draw(); };
  media.addEventListener("change", () => { if (!chosen) { theme(media.matches ? "dark" : "light"); redraw(); } });
  $("theme").addEventListener("click", () => { chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem("flowtrain-theme", chosen); theme(chosen); redraw(); });
}

const fresh = () => ({ steps: [], series: {}, latest: {}, width: 1, generation: -1 });

function wanted(run) {
  const names = run.about.charts.flatMap((chart) => chart.series.map((line) => line.name));
  return [...new Set([...names, ...tileNames, ...picked.keys()])];
}

// Fetch what is new of a run's history. The last bucket may have changed, so it is asked for again.
async function load(run, number, state) {
  if (run.busy) { run.again = state; return; }
  run.busy = true;
  try {
    const names = wanted(run), whole = run.columns.generation !== state.generation || names.some((name) => run.about.metrics.some((one) => one.name === name) && !(name in run.columns.series));
    const start = whole ? 0 : Math.max(0, run.columns.steps.length - 1);
    const parts = [];
    for (let n = 0; n < names.length; n += NAMES_A_REQUEST) parts.push(await get(`/api/runs/${number}/columns?names=${encodeURIComponent(names.slice(n, n + NAMES_A_REQUEST).join(","))}&start=${start}&generation=${Math.max(0, whole ? state.generation : run.columns.generation)}`));
    if (parts.some((part) => part.generation !== parts[0].generation || part.steps.length !== parts[0].steps.length)) { run.again ??= state; return; }
    const [{ start: from, steps, width, generation }] = parts, kept = from === 0 ? fresh() : run.columns, all = Object.assign({}, ...parts.map((part) => part.series));
    const columns = { width, generation, steps: kept.steps.slice(0, from).concat(steps), series: {}, latest: Object.assign({}, ...parts.map((part) => part.latest)) };
    for (const [name, found] of Object.entries(all)) columns.series[name] = found.map((column, n) => (kept.series[name]?.[n] ?? Array(from).fill(null)).slice(0, from).concat(column));
    run.columns = columns;
    for (const card of charts.values()) card.update();
    for (const card of picked.values()) card.update();
    tiles($("tiles"), runs);
    if (run.failed) { run.failed = false; link(""); }
  } catch (error) {
    run.failed = true;
    again(error, () => load(run, number, run.state));
  } finally {
    run.busy = false;
    if (run.again) { const next = run.again; run.again = null; load(run, number, next); }
  }
}

// Without a connection it is the stream, when it comes back, that tells what to fetch.
function again(error, fetch) {
  link(error.message);
  if (error.message !== GONE) setTimeout(fetch, RETRY_MS);
}

function link(text) { if ($("link").textContent !== text) $("link").textContent = text; }

function showCharts() {
  const groups = new Map();
  for (const spec of runs[0].about.charts) {
    const series = runs.map((run) => run.about.charts.find((one) => one.key === spec.key)?.series ?? []);
    if (charts.has(spec.key)) charts.get(spec.key).setSeries(series);
    else {
      charts.set(spec.key, new Card(spec, runs, series));
      if (!groups.has(spec.group)) groups.set(spec.group, []);
      groups.get(spec.group).push(charts.get(spec.key).node);
    }
  }
  for (const [group, nodes] of groups) {
    const id = `group-${group.toLowerCase().replace(/\W+/g, "-")}`;
    $("charts").append(el("section", { id, "aria-label": group }, el("h2", { text: group }), el("div", { class: "grid" }, ...nodes)));
    $("sections").append(el("a", { href: `#${id}`, text: group }));
  }
  if (groups.size) for (const [id, text] of [["flow", "Timeline"], ["setup", "Plan, rows, decisions"], ["all", "All metrics"]]) $("sections").append(el("a", { href: `#${id}`, text }));
}

function showPicker() {
  const metrics = new Map(runs.flatMap((run) => run.about.metrics).map((one) => [one.name, one]));
  if ($("picker").childElementCount === metrics.size) return;
  $("picker").replaceChildren(...[...metrics.values()].map((metric) => {
    const box = el("input", { type: "checkbox", checked: picked.has(metric.name), onchange: () => pick(metric, box.checked) });
    return el("label", { title: metric.meaning, "data-metric": metric.name }, box, el("span", { text: metric.name }));
  }));
  filter();
}

function filter() {
  const text = $("filter").value.toLowerCase();
  for (const label of $("picker").children) label.hidden = !label.dataset.metric.toLowerCase().includes(text);
}

function pick(metric, chosen) {
  if (!chosen) { picked.get(metric.name)?.remove(); picked.delete(metric.name); return; }
  const spec = { key: `metric ${metric.name}`, title: metric.name, unit: metric.unit, note: metric.meaning, empty: "No record has a value.", log: false, least: null, most: null };
  const card = new Card(spec, runs, runs.map(() => [{ name: metric.name, label: "value", key: "", dashed: false }]));
  picked.set(metric.name, card);
  $("picked").append(card.node);
  runs.forEach((run, number) => load(run, number, run.state));
}

async function about() {
  if (Date.now() - aboutAt < ABOUT_MS) { aboutLater ??= setTimeout(() => { aboutLater = null; about(); }, ABOUT_MS); return; }
  aboutAt = Date.now();
  try {
    const found = await get("/api/runs");
    found.forEach((one, number) => { runs[number].about = one; });
    showCharts(); showPicker();
    panels($("panels"), runs);
    found.forEach((one, number) => { if (wanted(runs[number]).some((name) => one.metrics.some((metric) => metric.name === name) && !(name in runs[number].columns.series))) load(runs[number], number, one.state); });
  } catch (error) { again(error, about); }
}

function changed(states) {
  if (states[0].server !== runs[0].about.state.server) { location.reload(); return; } // it may show other runs
  states.forEach((state, number) => {
    const run = runs[number], before = run.state;
    run.state = state;
    if (state.generation !== run.columns.generation || state.step !== before.step || run.columns.steps.length < state.buckets) load(run, number, state);
    timeline.changed(number, state.timeline);
    if (state.phase !== before.phase) for (const card of [...charts.values(), ...picked.values()]) card.update(); // what is empty says another thing
  });
  heads();
  about();
}

function heads() { header($("runs"), $("alert"), runs); problems($("problems"), runs); }

// A server that is busy, or whose disk does not answer, may do so later.
async function first() {
  for (;;) {
    try { const found = await get("/api/runs"); link(""); return found; }
    catch (error) { link(error.message); await new Promise((later) => setTimeout(later, RETRY_MS)); }
  }
}

async function start() {
  startTheme();
  $("filter").addEventListener("input", filter);
  $("smooth").addEventListener("change", () => { options.smoothing = Number($("smooth").value); });
  $("reset").addEventListener("click", () => options.resetZoom());
  options.onZoom = (zoomed) => { $("reset").hidden = !zoomed; };
  for (const one of await first()) runs.push({ name: one.name, about: one, state: one.state, columns: fresh() });
  const names = runs.map((run) => run.name);
  runs.forEach((run, n) => { if (names.indexOf(run.name) !== names.lastIndexOf(run.name)) run.name = `${run.name} (${n + 1})`; });
  document.title = `${names.join(", ")} – FlowTrain`;
  heads();
  showCharts(); showPicker();
  panels($("panels"), runs);
  timeline = new Timeline($("timeline"), runs);
  timeline.draw();
  await Promise.all(runs.map((run, number) => load(run, number, run.state)));
  document.addEventListener("visibilitychange", listen);
  listen();
}

// A hidden page gives its connection back, of which a browser has six for a server. A stream that was refused does not
// come back by itself.
function listen() {
  if (document.hidden) { events?.close(); events = null; return; }
  if (events) return;
  const opened = events = new EventSource("/api/events");
  opened.onmessage = (event) => { link(""); changed(JSON.parse(event.data)); };
  opened.onerror = () => {
    link(GONE);
    if (opened.readyState === EventSource.CLOSED && events === opened) { events = null; setTimeout(listen, RETRY_MS); }
  };
}

start().catch((error) => { $("alert").textContent = `The page could not start: ${error.message}`; $("alert").hidden = false; });
