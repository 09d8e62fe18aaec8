// Who did what in the last steps of a traced run: a row for each process, on one clock.

import { dark, el, format, get, GONE, table, variable } from "./dom.js";

const ROW = 20, GAP = 6, LABEL = 92, FOOT = 18;
const COLOURS = { encode: "#4269d0", forward: "#3ca951", backward: "#2f7d3f", optimizer: "#9498a0", decode: "#ff725c", preprocess: "#efb118", put: "#97bbf5", assemble: "#a463f2", "return gradient": "#ff8ab7", reduce: "#9c6b4e", read: "#6cc5b0", orders: "#c95f9b", answers: "#d9a1c4" };
const REST = { light: "#b9bec5", dark: "#6a6f76" };

export class Timeline {
  constructor(box, runs) {
    this.runs = runs; this.run = 0; this.versions = []; this.window = null; this.busy = false; this.paused = false; this.at = 0;
    this.canvas = el("canvas", { class: "time", tabindex: "0", role: "img", onpointermove: (event) => this.point(event), onpointerleave: () => { this.tip.hidden = true; } });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.keys = el("ul", { class: "keys" });
    this.told = el("p", { class: "quiet" });
    this.shares = el("div", { class: "scroll", hidden: true, tabindex: "0", role: "region", "aria-label": "Share of the time of each process" });
    this.steps = el("select", { onchange: () => this.load(true) }, ...[1, 2, 3, 5, 10, 20].map((n) => el("option", { value: n, text: n, selected: n === 2 })));
    this.chooser = el("select", { onchange: () => { this.run = Number(this.chooser.value); this.load(true); } }, ...runs.map((run, n) => el("option", { value: n, text: run.name })));
    this.hold = el("button", { type: "button", text: "Hold", "aria-pressed": "false", onclick: () => { this.paused = !this.paused; this.hold.setAttribute("aria-pressed", String(this.paused)); this.hold.textContent = this.paused ? "Follow" : "Hold"; if (!this.paused) this.load(true); } });
    this.toggle = el("button", { type: "button", text: "Table", "aria-expanded": "false", onclick: () => { this.shares.hidden = !this.shares.hidden; this.toggle.setAttribute("aria-expanded", String(!this.shares.hidden)); } });
    this.controls = el("div", { class: "two" }, runs.length > 1 ? el("label", { class: "choice" }, "Run ", this.chooser) : null, el("label", { class: "choice" }, "Last steps ", this.steps), this.hold, this.toggle);
    box.replaceChildren(this.controls, this.told, this.canvas, this.keys, this.shares, this.tip);
    new ResizeObserver(() => this.draw()).observe(box);
  }

  changed(run, version) {
    this.versions[run] = version;
    if (run === this.run && !this.paused && (this.window === null || this.shown !== version)) this.load(false);
  }

  async load(now) {
    if (this.busy || (!now && Date.now() - this.at < 1500)) { if (!this.later) this.later = setTimeout(() => { this.later = null; this.load(true); }, 1500); return; }
    this.busy = true;
    try {
      const { version, window } = await get(`/api/runs/${this.run}/timeline?steps=${this.steps.value}`);
      this.shown = version; this.window = window; this.at = Date.now();
      this.draw();
    } catch (error) {
      if (error.message === GONE) return; // the connection's own sign says so
      this.told.textContent = `The timeline cannot be fetched: ${error.message}`;
      this.later ??= setTimeout(() => { this.later = null; this.load(true); }, 3000);
    } finally { this.busy = false; }
  }

  draw() {
    const { window: found, canvas } = this, { about, state } = this.runs[this.run];
    const nothing = !found;
    canvas.hidden = this.keys.hidden = nothing;
    this.toggle.hidden = this.steps.parentElement.hidden = this.hold.hidden = nothing;
    if (nothing) {
      this.told.textContent = about.traced ? (["starting", "running"].includes(state.phase) ? "Waiting for the first two steps of the trace." : "The trace does not have two whole steps.") : "run.trace is off in this run: with run.trace: true its processes record what they do, and it shows here.";
      canvas.removeAttribute("aria-label");
      return;
    }
    const first = found.steps[0], last = found.steps[1];
    this.told.textContent = `${first === last ? `Step ${first}` : `Steps ${first} to ${last}`}, ${format(found.length / 1000)} ms. Grey ground: waiting.`;
    const width = canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft);
    const height = found.tracks.length * (ROW + GAP) + FOOT, ratio = devicePixelRatio;
    if (width < 50) return;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), scale = (width - LABEL) / found.length, text = variable("--text"), quiet = variable("--quiet"), names = new Set();
    pen.scale(ratio, ratio); pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    found.tracks.forEach((track, row) => {
      const y = row * (ROW + GAP);
      pen.fillStyle = text; pen.fillText(track.name, 0, y + ROW / 2, LABEL - 8);
      pen.fillStyle = variable("--track"); pen.fillRect(LABEL, y, width - LABEL, ROW);
      for (const [name, start, length] of track.pieces) {
        if (name === "wait") continue;
        names.add(name);
        pen.fillStyle = COLOURS[name] ?? REST[dark() ? "dark" : "light"];
        pen.fillRect(LABEL + start * scale, y, Math.max(length * scale, .5), ROW);
      }
    });
    pen.strokeStyle = pen.fillStyle = quiet;
    pen.setLineDash([3, 3]);
    found.marks.forEach(([step, at], number) => {
      const x = Math.min(LABEL + at * scale, width - .5);
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - FOOT); pen.stroke();
      pen.textAlign = number === 0 ? "left" : "right";
      if (number > 0 && (number === found.marks.length - 1 || found.marks.length < 8)) pen.fillText(`end of step ${step}`, x, height - FOOT / 2);
    });
    this.keys.replaceChildren(...[...names].map((name) => { const dot = el("span", { text: "■ ", "aria-hidden": "true" }); dot.style.color = COLOURS[name] ?? REST[dark() ? "dark" : "light"]; return el("li", {}, dot, name); }));
    const what = [...names, "wait"];
    const rest = (shares) => Math.max(0, 1 - Object.entries(shares).reduce((sum, [name, share]) => name === "wait" ? sum : sum + share, 0));
    this.shares.replaceChildren(table(["process", ...what.map((name) => `${name}, %`)], found.tracks.map((track) => [track.name, ...what.map((name) => Math.round(1000 * (name === "wait" ? rest(track.shares) : track.shares[name] ?? 0)) / 10)])));
    canvas.setAttribute("aria-label", `Timeline of steps ${first} to ${last}. ` + found.tracks.map((track) => `${track.name} works ${Math.round(100 * (1 - rest(track.shares)))} % of the time`).join(", "));
  }

  point(event) {
    if (!this.window) return;
    const area = this.canvas.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
    const track = this.window.tracks[Math.floor(y / (ROW + GAP))], at = (x - LABEL) / (area.width - LABEL) * this.window.length;
    const piece = x > LABEL && track ? track.pieces.findLast(([, start, length]) => start <= at && at <= start + length) : null;
    this.tip.hidden = !piece;
    if (!piece) return;
    this.tip.textContent = `${piece[0]} ${format(piece[2] / 1000)} ms`;
    this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 150)}px`; this.tip.style.top = `${event.clientY + 14}px`;
  }
}
