// The newest rows of a live run in the header and in the event log, before they are stored.
import { duration, grouped, short, shown } from "./logic.js";
import { SPEEDS, SUMMED, contextOf, median, ranksNote, secondsLeft, valuesOf } from "./tail.js";

const SPEED_STEPS = 20;
const MOST_LINES = 200;
/** Least time in milliseconds between two changes of the event log, because each change draws all of its lines again. */
const LINES_EVERY = 1000;

let linesAt = -LINES_EVERY; // time of the last change
let shownAt = 0; // time in milliseconds at which the server had a new step; 0 if it had none
let timer = 0; // of the next change, if lines wait for it
/** @type {import("./tail.js").Row[]} */ let latest = [];

/**
 * Change the text of an element, unless it is the same: each change costs a layout.
 * @param {Element | null} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/**
 * Show the newest values in the header of the page, and a line for each new step in its event log.
 * @param {import("./tail.js").Row[]} rows
 */
export function showNewest(rows) {
  latest = rows;
  const last = showLatest();
  if (!last) return;
  const word = document.querySelector(".live span");
  const behind = Math.max(0, Date.now() / 1000 - last[2]);
  setText(word, `Live, ${behind < 10 ? behind.toFixed(1) : Math.round(behind)} s behind`);
  if (!timer) timer = setTimeout(addLatest, Math.max(0, linesAt + LINES_EVERY - performance.now()));
}

/**
 * Show the age of the newest step of a run of which the service sends no rows, such as a followed log.
 * @param {boolean} isNew whether the page shows a new step
 */
export function showAge(isNew) {
  if (isNew && !shownAt) setInterval(showAge, 1000, false);
  if (isNew) shownAt = Date.now();
  if (!shownAt || latest.length || document.body.classList.contains("late")) return;
  setText(document.querySelector(".live span"), `Live, last step ${Math.round((Date.now() - shownAt) / 1000)} s ago`);
}

/** Show the age of the newest row of the table of ranks, which follows the commits of the store. */
export function showBehind() {
  const seen = Number(/** @type {HTMLElement | null} */ (document.querySelector("[data-seen]"))?.dataset.seen);
  const word = document.querySelector(".live span");
  if (seen && !document.body.classList.contains("late")) setText(word, `Live, ${Math.max(0, Math.round(Date.now() / 1000 - seen))} s behind`);
}

/**
 * Return the median of a speed over the newest steps, as the server does; of a throughput, the sum over ranks.
 * @param {import("./tail.js").Row[]} rows
 * @param {string} name
 * @param {boolean} isSummed
 */
function usual(rows, name, isSummed) {
  return median(rows.slice(-SPEED_STEPS).map((row) => valuesOf(row, name)).flatMap((one) => (one ? [(isSummed ? one[3] : one[0]) ?? one[0] ?? NaN] : [])));
}

/**
 * Show the newest values in the header of the page, unless the header of the server is of a later step. Return the row
 * that was logged last: a younger attempt than that of the header may have ended before it.
 */
export function showLatest() {
  const head = document.getElementById("head");
  const [attempt, at] = [Number(head?.dataset.attempt), Number(head?.dataset.step || -1)];
  const newer = latest.filter((row) => row[0] >= attempt);
  const newest = newer.reduce((one, row) => (row[2] >= one[2] ? row : one), newer[0]);
  const own = newer.filter((row) => row[0] === newest[0]);
  const isLive = Boolean(head?.querySelector("[data-left]")); // a failed run has rows of the step in which it failed
  const ranks = Number(head?.dataset.ranks ?? 0);
  const note = document.querySelector("#chart-loss header .dim");
  const words = ranksNote(own, ranks) || (ranks > 1 ? `mean of ${ranks} ranks` : "$&");
  setText(note, note?.textContent?.replace(/^(logged by 1 rank|(mean of )?\d+ (of \d+ )?ranks)/, words) ?? "");
  const rows = own.filter((row) => row[0] > attempt || (isLive && row[1] > at));
  const last = rows.at(-1);
  if (!last) return newest;
  for (const place of /** @type {NodeListOf<HTMLElement>} */ (head?.querySelectorAll("[data-value]") ?? [])) {
    const name = place.dataset.value ?? "";
    if (name === "step") setText(place, grouped(last[1]));
    const row = rows.findLast((one) => valuesOf(one, name));
    const values = row && valuesOf(row, name);
    const line = place.closest("dd")?.lastElementChild ?? null;
    setText(line, contextOf(name, own, line?.textContent ?? "", ranks, at));
    if (!values) continue;
    const isSummed = SUMMED.includes(name);
    const value = SPEEDS.includes(name) ? usual(own, name, isSummed) : (values[0] ?? NaN);
    setText(place, isSummed ? short(value) : shown(value));
    place.parentElement?.classList.toggle("bad", !Number.isFinite(value));
  }
  const planned = Number(head?.dataset.planned);
  const [bar, width] = [head?.querySelector(".bar rect + rect"), Math.min(1000, (1000 * last[1]) / planned).toFixed(1)];
  if (planned && bar && bar.getAttribute("width") !== width) bar.setAttribute("width", width);
  const most = last[1] < planned ? 999 : 1000;
  setText(head?.querySelector("[data-share]") ?? null, `${Math.min(most, Math.round((1000 * last[1]) / planned)) / 10} %`);
  showLeft(head?.querySelector("[data-left]") ?? null, secondsLeft(own, planned), last[2]);
  return newest;
}

/**
 * Show the time left after the step at the time `from`, unless it is unknown or no step is left.
 * @param {Element | null} place
 * @param {number} seconds
 * @param {number} from
 */
function showLeft(place, seconds, from) {
  const end = new Date((from + seconds) * 1000);
  const about = Number.isNaN(end.getTime()) ? "" : `, about ${end.toUTCString().slice(5, 11)}${end.toUTCString().slice(16, 22)} UTC`;
  const texts = seconds > 0 ? [" · ", duration(seconds), ` left${about}`] : [];
  if (!place || place.textContent === texts.join("")) return;
  const bold = document.createElement("b");
  bold.textContent = texts[1] ?? "";
  place.replaceChildren(...(texts.length ? [texts[0], bold, texts[2]] : []));
}

function addLatest() {
  timer = 0;
  linesAt = performance.now();
  addLines(latest);
}

/**
 * Add lines at the top of the event log for steps after that of its newest line of a step.
 * @param {import("./tail.js").Row[]} rows
 */
function addLines(rows) {
  const table = /** @type {HTMLTableElement | null} */ (document.querySelector("#events .events"));
  const known = table?.querySelector(".i.step")?.closest("tr");
  if (!table || !known) return;
  const newest = Number(known.cells[2].textContent?.replaceAll(",", ""));
  const begin = rows.findLastIndex(([, step]) => step <= newest) + 1;
  for (const [, step, time, values] of rows.slice(begin)) {
    if (!values.loss) continue;
    const line = /** @type {HTMLTableRowElement} */ (known.cloneNode(true));
    const at = new Date(time * 1000).toISOString();
    line.cells[0].textContent = at.slice(11, 19);
    line.cells[0].title = `${at.slice(0, 19).replace("T", " ")} UTC`;
    line.cells[2].textContent = grouped(step);
    const parts = [`loss ${digits(values.loss[0])}`, ...(values.grad_norm ? [`grad ${digits(values.grad_norm[0])}`] : [])];
    line.cells[3].textContent = parts.join(", ");
    table.tBodies[0].prepend(line);
  }
  while (table.rows.length > MOST_LINES) table.deleteRow(-1);
}

/** @param {number | null} value */
function digits(value) {
  return value === null ? "NaN" : String(Number(value.toPrecision(4)));
}
