// Small things that every part needs: elements without markup from data, numbers as people read them, colours.

export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function table(head, rows) {
  const numeric = head.map((_, n) => rows.length > 0 && rows.every((row) => typeof row[n] === "number" || row[n] === null));
  const cell = (name, value, n) => el(name, { class: numeric[n] ? "number" : null, text: typeof value === "number" ? format(value) : value ?? "–", scope: name === "th" ? "col" : null });
  return el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((value, n) => cell("th", value, n)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, n) => value instanceof Node ? el("td", {}, value) : cell("td", value, n))))));
}

const SCALES = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]; // from which size on, by what

export function format(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (unit === "B" && size >= 1024) {
    const power = Math.min(4, Math.floor(Math.log2(size) / 10));
    return `${(value / 1024 ** power).toPrecision(3)} ${["", "Ki", "Mi", "Gi", "Ti"][power]}`;
  }
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  for (const [least, scale, letter] of SCALES) if (size >= least) return `${Number((value / scale).toPrecision(3))} ${letter}`;
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(size < 1 ? 3 : 4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const total = Math.round(seconds), hours = Math.floor(total / 3600), minutes = Math.floor(total / 60) % 60;
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(total % 60)}` : `${minutes}:${two(total % 60)}`;
}

const PALETTE = {
  light: { all: "#1b1f24", encoder: "#e8590c", projector: "#9c36b5", backbone: "#1971c2", eval: "#2f9e44", wait: "#c2255c", pool: "#0c8599", free: ["#1971c2", "#e8590c", "#2f9e44", "#9c36b5", "#c2255c", "#0c8599", "#a87900", "#5c6bc0"] },
  dark: { all: "#e4e8ec", encoder: "#ff9f5a", projector: "#d68cf0", backbone: "#66b2ff", eval: "#63d484", wait: "#ff7fa8", pool: "#4fd1dd", free: ["#66b2ff", "#ff9f5a", "#63d484", "#d68cf0", "#ff7fa8", "#4fd1dd", "#e8c24a", "#a5b0ff"] },
};

export const dark = () => document.documentElement.dataset.theme === "dark";

export function colour(key, number) {
  const palette = PALETTE[dark() ? "dark" : "light"];
  return palette[key] && key !== "free" ? palette[key] : palette.free[number % palette.free.length];
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const GONE = "not connected: what is shown may be old";

export async function get(path) {
  const answer = await fetch(path, { credentials: "same-origin" }).catch(() => { throw new Error(GONE); });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `the server answered ${answer.status}`);
  return answer.json();
}
