// What is not a curve: header, newest values, plan with who runs where, rows skipped, decisions.

import { duration, el, format, table } from "./dom.js";

const TILES = [["loss_metrics/global_avg_loss", "Loss"], ["throughput(tps)", "Throughput", "tokens/s"], ["mfu(%)", "MFU", "%"], ["mfu/gap_to_llm_only(%)", "Gap to LLM-only", "%"], ["pool/occupancy(%)", "Pool", "%"], ["flow/starvation(s)", "Starvation", "s"], ["time_metrics/end_to_end(s)", "Step time", "s"]];
const WORDS = { done: "done", running: "running", starting: "starting", stopped: "stopped", failed: "failed", lost: "ended without a word" };

export const tileNames = TILES.map(([name]) => name);

export function header(box, alert, runs) {
  box.replaceChildren(...runs.map(({ name, about: { path }, state }) => {
    const code = state.exit_code ? ` (exit ${state.exit_code})` : "";
    return el("div", { class: "run" }, el("b", { text: name, title: path }), el("span", { class: `pill ${state.phase}`, text: WORDS[state.phase] + code }),
      state.total && state.phase === "running" ? el("progress", { max: state.total, value: state.step, "aria-label": `step ${state.step} of ${state.total}` }) : null,
      el("span", { class: "quiet", text: `step ${format(state.step)}${state.total ? ` of ${format(state.total)}` : ""}${state.left !== null ? ` · ${duration(state.left)} left` : ""}${state.read < .999 ? ` · reading ${Math.floor(100 * state.read)} %` : ""}` }));
  }));
  const lines = runs.filter(({ state }) => state.line && state.phase !== "done").map(({ name, state }) => (runs.length > 1 ? `${name}: ` : "") + state.line);
  if (alert.textContent !== lines.join(" ")) alert.textContent = lines.join(" ");
  alert.hidden = lines.length === 0;
}

export function problems(box, runs) {
  const found = runs.flatMap(({ name, state }) => (state.problems ?? []).map((text) => (runs.length > 1 ? `${name}: ` : "") + text));
  if ([...box.children].map((one) => one.textContent).join("\n") !== found.join("\n")) box.replaceChildren(...found.map((text) => el("li", { text })));
  box.hidden = found.length === 0;
}

export function tiles(box, runs) {
  box.replaceChildren(...TILES.map(([metric, label, unit]) => {
    const values = runs.map((run) => run.columns.latest[metric] ?? null);
    return el("div", { class: "tile", "data-tile": metric }, el("div", { class: "name", text: label }),
      el("div", { class: "value" }, format(values[0]), unit && values[0] !== null ? el("span", { class: "unit", text: unit }) : null),
      ...values.slice(1).map((value, n) => el("div", { class: "other", text: `${runs[n + 1].name}: ${format(value)}` })));
  }));
}

function card(title, ...content) {
  return el("section", { class: "card", "aria-label": title }, el("h3", { text: title }), ...content);
}

export function panels(box, runs) {
  const open = new Set([...box.querySelectorAll("[tabindex]")].filter((one) => one.scrollTop).map((one) => one.parentElement.getAttribute("aria-label")));
  if (open.size) return; // somebody reads: do not move the text away
  box.replaceChildren(...runs.flatMap(({ name, about }) => {
    const of = runs.length > 1 ? ` of ${name}` : "", { plan, rows } = about;
    const facts = [["mode", about.facts.mode], ["placement", plan.placement], ["cores", plan.cpus], ["readers", plan.readers], ["pool", plan.pool_bytes ? `${format(plan.pool_bytes, "B")}B` : null], ["peak FLOP/s from", about.facts.peak], ["last record", about.facts.written]].filter(([, value]) => value !== null && value !== undefined);
    const scroll = (label, inner) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, inner);
    return [
      card(`Plan${of}`, plan.sides.length ? scroll("Plan", table(["side", "layout", "ranks", "device", "threads"], plan.sides.map((side) => [side.role, side.layout, side.ranks, side.devices.join(", "), side.threads.join(", ")]))) : el("p", { class: "quiet", text: "plan.yaml is not there yet." }),
        el("div", { class: "scroll" }, table(["about", ""], facts.map(([key, value]) => [key, String(value)])))),
      card(`Who runs where${of}`, plan.nodes.length ? scroll("Who runs where", table(["node", "processes"], plan.nodes.map((node) => [String(node.node), node.who.join(" · ")]))) : el("p", { class: "quiet", text: "No plan yet." })),
      card(`Rows${of}`, el("p", { text: `${format(rows.trained)} trained, ${format(rows.skipped)} skipped` }),
        rows.reasons.length ? scroll("Rows skipped by reason", table(["reason", "rows", "first ids"], rows.reasons.map((one) => [one.reason, one.count, one.ids.join(", ")]))) : el("p", { class: "quiet", text: rows.ended ? "No row was skipped." : "No row was skipped so far." })),
      card(`Decisions${of}`, about.decisions.length ? scroll("Decisions, newest first", table(["step", "kind", "what"], about.decisions.map((one) => [one.step ?? null, one.kind === "proposal" ? el("b", { text: "proposal" }) : one.kind, el("code", { text: one.text })]))) : el("p", { class: "quiet", text: "decisions.jsonl is empty." })),
    ];
  }));
}
