// One chart: a card with title, plot, keys with the values at the cursor, a text alternative and a table on demand.

import { colour, el, format, table, variable } from "./dom.js";

const HEIGHT = 190, TABLE_ROWS = 200, DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const sync = uPlot.sync("steps");
const cards = new Set();
let zoom = null, smoothing = 0;

export const options = {
  set smoothing(value) { smoothing = value; for (const card of cards) card.update(); },
  restyle() { for (const card of cards) card.rebuild(); },
  resetZoom() { setZoom(null); },
  onZoom: () => {},
};

function setZoom(range) {
  zoom = range;
  for (const card of cards) card.follow();
  options.onZoom(range !== null);
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { entry.target.card.visible = true; entry.target.card.update(); seen.unobserve(entry.target); }
}, { rootMargin: "300px" });

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const { plot, box } = entry.target.card;
    if (plot && box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: HEIGHT });
  }
});

function smoothed(values) {
  if (!smoothing) return values;
  let mean = null;
  return values.map((value) => value === null ? null : (mean = mean === null ? value : smoothing * mean + (1 - smoothing) * value));
}

export class Card {
  // `spec`: as the server's table of charts has it. `runs`: [{name, columns}], columns as `store.js` keeps them.
  // `series`: for each run, [{name, label, key, dashed}].
  constructor(spec, runs, series) {
    this.spec = spec; this.runs = runs; this.hidden = new Set(); this.plot = null; this.visible = false; this.showsTable = false;
    this.title = el("h3", { text: spec.title });
    this.toggle = el("button", { type: "button", text: "Table", "aria-expanded": "false", "aria-label": `Table of ${spec.title}`, onclick: () => this.flip() });
    this.box = el("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event) });
    this.box.card = this;
    this.keys = el("ul", { class: "keys" });
    this.spoken = el("p", { class: "sr", "aria-live": "polite" });
    this.rows = el("div", { class: "scroll", hidden: true, tabindex: "0", role: "region", "aria-label": `Table of ${spec.title}` });
    this.node = el("section", { class: "card", "data-chart": spec.key, "aria-label": spec.title },
      el("div", { class: "head" }, this.title, el("span", { class: "unit", text: spec.unit }), el("span", { class: "spread" }), this.toggle),
      el("p", { class: "note", text: spec.note }), this.box, this.keys, this.rows, this.spoken);
    cards.add(this);
    seen.observe(this.box); resized.observe(this.box);
    this.setSeries(series);
  }

  remove() { cards.delete(this); seen.unobserve(this.box); resized.unobserve(this.box); this.plot?.destroy(); this.node.remove(); }

  setSeries(series) {
    const wanted = series.flatMap((lines, run) => lines.map((line, number) => ({ ...line, run, number })));
    if (this.lines && JSON.stringify(wanted) === this.told) return;
    this.told = JSON.stringify(wanted);
    this.lines = wanted;
    this.rebuild();
  }

  rebuild() {
    this.plot?.destroy(); this.plot = null; this.shape = null;
    this.values = this.lines.map((line) => {
      const value = el("data", {}), several = this.runs.length > 1;
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      mark.setAttribute("width", "16"); mark.setAttribute("height", "4"); mark.setAttribute("aria-hidden", "true");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, at] of Object.entries({ x1: 0, x2: 16, y1: 2, y2: 2, stroke: this.colour(line), "stroke-width": 2.5, "stroke-dasharray": this.dash(line).join(" ") })) stroke.setAttribute(name, at);
      mark.append(stroke);
      line.shown = several ? `${line.label} · ${this.runs[line.run].name}` : line.label;
      line.button = el("button", { type: "button", "aria-pressed": String(!this.hidden.has(line.run + line.name)), "data-name": line.name, "data-run": line.run, title: line.name, onclick: () => this.hide(line) },
        mark, el("span", { text: line.shown }), el("b", {}, value));
      return value;
    });
    this.keys.replaceChildren(...this.lines.map((line) => el("li", {}, line.button)));
    this.update();
  }

  colour(line) { return colour(line.key, line.number); }
  dash(line) { return DASHES[(line.dashed ? 2 : 0) + line.run & 3] ?? []; }

  hide(line) {
    const name = line.run + line.name;
    if (!this.hidden.delete(name)) this.hidden.add(name);
    line.button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    this.shape = null;
    this.update();
  }

  // The table that uPlot draws: steps, then for each line its last value, and least and most where buckets are wide.
  data() {
    const tables = [], layout = [];
    this.runs.forEach((run, number) => {
      const columns = run.columns, one = [columns.steps];
      for (const line of this.lines.filter((line) => line.run === number)) {
        const found = columns.series[line.name] ?? [];
        const nothing = () => columns.steps.map(() => null);
        one.push(smoothed(found[0] ?? nothing()));
        layout.push([line, "last"]);
        if (columns.width > 1) {
          one.push(found[1] ?? nothing(), found[2] ?? nothing());
          layout.push([line, "least"], [line, "most"]);
        }
      }
      tables.push(one);
    });
    const joined = tables.length === 1 ? tables[0] : uPlot.join(tables.filter((one) => one.length > 1));
    return { data: joined?.length ? joined : [[]], layout };
  }

  update() {
    const empty = !this.lines.some((line) => this.runs[line.run].columns.series[line.name]?.[0].some((value) => value !== null));
    this.toggle.hidden = empty;
    if (empty) {
      this.plot?.destroy(); this.plot = null;
      const lives = this.runs.some((run) => run.state.phase === "starting" || run.state.phase === "running");
      const nothing = lives ? "Waiting for the first step." : "There is no step to show.";
      const told = this.runs.every((run) => run.columns.steps.length === 0) ? nothing : this.spec.empty;
      if (this.box.textContent !== told) this.box.replaceChildren(el("p", { class: "empty", text: told }));
    } else if (this.visible) {
      const { data, layout } = this.data();
      const log = this.spec.log && !data.slice(1).some((column) => column.some((value) => value !== null && value <= 0));
      const shape = JSON.stringify([layout.map(([line, kind]) => [line.run, line.name, kind]), log]);
      if (shape !== this.shape || !this.plot) {
        this.plot?.destroy();
        this.box.replaceChildren();
        this.shape = shape;
        this.plot = new uPlot(this.opts(layout, log), data, this.box);
        this.follow();
      } else {
        this.plot.setData(data, zoom === null);
        if (zoom) this.follow();
      }
    }
    this.tell();
    if (this.showsTable) this.fill();
  }

  follow() {
    if (!this.plot) return;
    const steps = this.plot.data[0], range = zoom ?? { min: steps[0], max: steps.at(-1) };
    const { min, max } = this.plot.scales.x;
    if (range.min !== min || range.max !== max) this.plot.setScale("x", range.min === range.max ? { min: range.min - 1, max: range.max + 1 } : range);
  }

  opts(layout, log) {
    const { spec } = this, quiet = variable("--quiet"), grid = { stroke: variable("--grid"), width: 1 };
    const axis = { stroke: quiet, grid, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const series = [{}], bands = [];
    layout.forEach(([line, kind], number) => {
      const shown = !this.hidden.has(line.run + line.name), stroke = this.colour(line);
      if (kind === "last") series.push({ label: line.shown, stroke, width: 1.5, dash: this.dash(line), show: shown, spanGaps: true, points: { show: (u, s) => u.data[s].reduce((n, value) => n + (value !== null), 0) < 40, size: 5, fill: stroke } });
      else series.push({ label: line.shown, stroke: "transparent", width: 0, show: shown, spanGaps: true, points: { show: false } });
      if (kind === "most") bands.push({ series: [number + 1, number], fill: stroke + "2b" });
    });
    const range = (u, low, high) => {
      if (low === null) return [0, 1];
      const room = (high - low) * .06 || Math.abs(high) * .1 || 1;
      const bottom = spec.least !== null && low >= spec.least ? spec.least : low - room;
      return [bottom, spec.most !== null && high <= spec.most && high > spec.most * .6 ? spec.most : high + room];
    };
    return {
      width: this.box.clientWidth, height: HEIGHT, series, bands, legend: { show: false }, padding: [8, 16, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
      axes: [{ ...axis, size: 24, values: (u, ticks) => ticks.map((tick) => Number.isInteger(tick) ? format(tick) : "") },
        { ...axis, size: 54, values: (u, ticks) => ticks.map((tick) => tick === null ? "" : format(tick, spec.unit)) }],
      cursor: { sync: { key: sync.key }, points: { size: 6, show: (u, number) => layout[number - 1]?.[1] === "last" ? undefined : false }, drag: { x: true, y: false, setScale: false }, focus: { prox: -1 },
        bind: { dblclick: () => () => { setZoom(null); return null; } } },
      hooks: {
        setCursor: [(u) => this.tell(u.cursor.idx)],
        setSelect: [(u) => { if (u.select.width > 4) { setZoom({ min: u.posToVal(u.select.left, "x"), max: u.posToVal(u.select.left + u.select.width, "x") }); } u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }],
      },
    };
  }

  // Values at the cursor, or the newest ones; and the words for who does not see the picture.
  tell(index = null) {
    const at = index === null || index === undefined || !this.plot ? null : this.plot.data[0][index];
    const words = [];
    this.lines.forEach((line, number) => {
      const { columns } = this.runs[line.run], found = columns.series[line.name]?.[0] ?? [];
      let value;
      if (at === null || at === undefined) { value = line.name in columns.latest ? columns.latest[line.name] : found.findLast((one) => one !== null) ?? null; }
      else { const place = columns.steps.indexOf(at); value = place < 0 ? null : found[place] ?? null; }
      this.values[number].textContent = format(value, this.spec.unit);
      this.values[number].setAttribute("value", value ?? "");
      if (at === null) {
        const [last, least, most] = columns.series[line.name] ?? [[]];
        const ends = (column, choose) => (column ?? last).reduce((best, one) => one === null ? best : best === null ? one : choose(best, one), null);
        words.push(value === null ? `${line.shown}: no value` : `${line.shown}: last ${format(value, this.spec.unit)}, least ${format(ends(least, Math.min), this.spec.unit)}, most ${format(ends(most, Math.max), this.spec.unit)}`);
      }
    });
    this.node.querySelector(".note").textContent = at === null || at === undefined ? this.spec.note : `step ${format(at)}`;
    if (at === null) this.box.setAttribute("aria-label", `${this.spec.title}${this.spec.unit ? ` in ${this.spec.unit}` : ""}. ${words.join(". ") || this.spec.empty}`);
  }

  key(event) {
    if (!this.plot) return;
    const steps = this.plot.data[0], last = steps.length - 1, from = this.plot.cursor.idx ?? last + 1;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to === null) { this.plot.setCursor({ left: -10, top: -10 }, true, true); return; }
    const index = Math.max(0, Math.min(last, to));
    this.plot.setCursor({ left: this.plot.valToPos(steps[index], "x"), top: 20 }, true, true);
    this.spoken.textContent = `step ${steps[index]}: ${this.lines.map((line, n) => `${line.shown} ${this.values[n].textContent}`).join(", ")}`;
  }

  flip() {
    this.showsTable = !this.showsTable;
    this.toggle.setAttribute("aria-expanded", String(this.showsTable));
    this.rows.hidden = !this.showsTable;
    if (this.showsTable) this.fill();
  }

  fill() {
    const { data, layout } = this.data(), first = Math.max(0, data[0].length - TABLE_ROWS);
    const lasts = layout.map(([line, kind], n) => kind === "last" ? [line.shown, data[n + 1]] : null).filter(Boolean);
    const rows = [];
    for (let n = data[0].length - 1; n >= first; n--) rows.push([data[0][n], ...lasts.map(([, column]) => column[n] ?? null)]);
    this.rows.replaceChildren(table(["step", ...lasts.map(([name]) => name)], rows));
  }
}
