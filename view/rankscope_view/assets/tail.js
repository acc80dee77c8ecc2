// Rows of a live run that are not in the store yet: they extend the curves of the server. No function touches the document.

import { STRENGTH, grouped, shown } from "./logic.js";

/** @typedef {import("./logic.js").Curve} Curve */
/** @typedef {import("./logic.js").State} State */
/** @typedef {[number, number, number, Record<string, (number | null)[]>]} Row attempt, step, UTC seconds, and by name: mean, lowest, highest, and the sum of a throughput or the number of ranks of the loss */
/** @typedef {{curve: Curve, choice: string, shown: Curve, last: Row | undefined}} Grown a curve of the server, the same with rows behind it, and the last of these rows */

const KEPT = 600;

/**
 * Return known rows with newer ones, of which each replaces the known row of the same step.
 * @param {Row[]} known
 * @param {Row[]} rows
 * @returns {Row[]}
 */
export function merged(known, rows) {
  if (!rows.length) return known;
  const [attempt, step] = rows[0];
  const before = known.filter((row) => row[0] < attempt || (row[0] === attempt && row[1] < step));
  return [...before, ...rows].slice(-KEPT);
}

/**
 * Return the values of a scalar in a row: mean, lowest and highest. The perplexity follows from the loss.
 * @param {Row} row
 * @param {string} name
 * @returns {(number | null)[] | undefined}
 */
export function valuesOf(row, name) {
  if (name !== "perplexity") return row[3][name];
  return row[3].loss?.map((one) => (one === null ? null : Math.exp(one)));
}

const PACE = { steps: 100, seconds: 30, rows: 10, parts: 5 };
export const SUMMED = ["tokens_per_second", "samples_per_second"];
export const SPEEDS = [...SUMMED, "steps_per_second", "step_seconds"];

/**
 * Return the median; NaN of no values.
 * @param {number[]} values
 * @returns {number}
 */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return ((sorted[(sorted.length - 1) >> 1] ?? NaN) + (sorted[sorted.length >> 1] ?? NaN)) / 2;
}

/**
 * Return the time of the remaining steps at the median pace of five parts of the newest rows, as the server does; NaN if
 * it is unknown.
 * @param {Row[]} rows of one attempt
 * @param {number} planned
 * @returns {number}
 */
export function secondsLeft(rows, planned) {
  const last = rows.at(-1);
  if (!last) return NaN;
  const recent = rows.filter((row, at) => at >= rows.length - PACE.rows - 1 || (row[1] > last[1] - PACE.steps && row[2] > last[2] - PACE.seconds));
  const marks = [...new Set([...Array(PACE.parts + 1).keys()].map((part) => Math.floor(((recent.length - 1) * part) / PACE.parts)))].map((at) => recent[at]);
  return (planned - last[1]) * median(marks.slice(1).map((row, at) => (row[2] - marks[at][2]) / (row[1] - marks[at][1])));
}

/**
 * Return the number of ranks in the newest loss if ranks are missing, such as `1 of 2 ranks`; else an empty text.
 * @param {Row[]} rows
 * @param {number} most the number of ranks that is known
 */
export function ranksNote(rows, most) {
  const counts = rows.flatMap((row) => row[3].loss?.[3] ?? []);
  const of = Math.max(most, ...counts);
  return counts.length && counts[counts.length - 1] < of ? `${counts[counts.length - 1]} of ${of} ranks` : "";
}

/**
 * Return the line below a value in the header, over rows that the page has received. Changes are found by the server, over
 * all stored rows. Without a row with the value, as of a gradient norm from stored statistics, the line is the step up to
 * which the server knew the value.
 * @param {string} name
 * @param {Row[]} rows of one attempt
 * @param {string} before the line of the server
 * @param {number} ranks the number of ranks that log the loss
 * @param {number} at the step of the header of the server
 * @returns {string}
 */
export function contextOf(name, rows, before, ranks, at) {
  if (!["loss", "learning_rate", "grad_norm", ...SPEEDS].includes(name)) return before;
  const own = rows.filter((row) => valuesOf(row, name));
  const isLate = name === "loss" && before.startsWith("no loss since");
  if (isLate && own.length < 2) return before;
  if (!own.length) return at < 0 ? "" : `up to step ${grouped(at)}`;
  if (name !== "loss") return before.startsWith("up to") ? "" : before;
  const [first, last] = [own[0][1], own[own.length - 1][1]];
  const isEnded = rows[rows.length - 1][1] - last > Math.max(10, (5 * (last - first)) / (own.length - 1)); // NaN of one row
  if (isEnded) return `no loss since step ${grouped(last)}`;
  const values = own.map((row) => valuesOf(row, name)?.[0] ?? NaN);
  const finite = values.findLastIndex(Number.isFinite);
  const note = ranksNote(own, ranks);
  if (note || finite === values.length - 1) return note || (/^median/.test(before) ? before : "");
  return finite < 0 ? (before.startsWith("last finite") ? before : "") : `last finite ${shown(values[finite])} at step ${grouped(own[finite][1])}`;
}

/**
 * Return `extended`, from its result before if rows were only added since then. The arrays of that result grow.
 * @param {Grown | undefined} before
 * @param {Curve} curve
 * @param {Row[]} rows
 * @param {State} state
 * @returns {Grown}
 */
export function grown(before, curve, rows, state) {
  const choice = JSON.stringify(state);
  const last = rows.at(-1);
  const at = before?.last && before.curve === curve && before.choice === choice && before.shown !== curve ? rows.lastIndexOf(before.last) : -1;
  if (!before || at < 0) return { curve, choice, shown: extended(curve, rows, state), last };
  const shown = { ...before.shown };
  for (const [name, line] of growing(shown)) {
    for (const row of ownRows(rows.slice(at + 1), curve, name)) append(line, row, curve, shown.nonfinite, state, name);
    shown.extent = reaching(shown.extent, line);
  }
  return { curve, choice, shown, last };
}

/**
 * @param {Row[]} rows
 * @param {Curve} curve
 * @param {string} name
 */
function ownRows(rows, curve, name) {
  return rows.filter((row) => (row[0] === curve.attempt || !curve.rows) && valuesOf(row, name));
}

/**
 * Return the lines of a curve that new rows extend, each with the name under which the rows have its values.
 * @param {Curve} curve
 * @returns {[string, import("./logic.js").Line][]}
 */
function growing(curve) {
  const last = curve.lines.at(-1);
  if (!last || last.role || curve.lines[0].label?.length === 1) return [];
  const keyed = new Map(curve.lines.map((line) => [line.key ?? curve.name, line]));
  return last.key ? [...keyed] : [[curve.name, last]];
}

/**
 * @param {[number, number] | null} extent
 * @param {import("./logic.js").Line} line
 * @returns {[number, number] | null}
 */
function reaching(extent, line) {
  if (!line.x.length) return extent;
  const last = line.x[line.x.length - 1];
  return [extent?.[0] ?? line.x[0], Math.max(extent?.[1] ?? last, last)];
}

/**
 * Return a curve of the server with rows behind it. A curve that is zoomed, or of an earlier attempt, remains as it is.
 * @param {Curve} curve
 * @param {Row[]} rows
 * @param {State} state
 * @returns {Curve}
 */
export function extended(curve, rows, state) {
  if (state.to !== null) return curve;
  /** @type {Curve} */ const shown = { ...curve, lines: [...curve.lines], nonfinite: curve.nonfinite.map(([...range]) => range) };
  if (!curve.rows && !curve.lines.length) shown.lines.push({ label: null, x: [], step: [], value: [], smoothed: [], low: [], high: [] });
  let isExtended = false;
  for (const [name, line] of growing(shown)) {
    const own = ownRows(rows, curve, name).filter((row) => !line.x.length || row[1] > line.step[0]); // its first point remains
    let end = line.x.length;
    while (own.length && end > 0 && line.step[end - 1] >= own[0][1]) end -= 1;
    if (end < line.x.length - KEPT) continue;
    const next = { ...line };
    for (const part of /** @type {("x" | "step" | "value" | "smoothed" | "low" | "high")[]} */ (["x", "step", "value", "smoothed", "low", "high"])) {
      next[part] = /** @type {any} */ (line[part].slice(0, end));
    }
    if (!isExtended && own.length) {
      const from = placeOf(next, own[0], curve, undefined);
      shown.nonfinite = shown.nonfinite.filter(([first]) => first < from).map(([first, last, word]) => [first, Math.min(last, from), word]);
    }
    for (const row of own) append(next, row, curve, shown.nonfinite, state, name);
    shown.lines[shown.lines.indexOf(line)] = next;
    shown.extent = reaching(shown.extent, next);
    isExtended ||= own.length > 0;
  }
  return isExtended ? shown : curve;
}

/**
 * Return the place of a row behind a line, which may end with rows that are not finite and have no point.
 * @param {import("./logic.js").Line} line
 * @param {Row} row
 * @param {Curve} curve
 * @param {[number, number, string] | undefined} range the last range without finite values
 * @returns {number}
 */
function placeOf(line, [, step, time], curve, range) {
  const before = line.x.length - 1;
  const places = before < 0 ? { time } : { arrival: Math.max(line.x[before], range?.[1] ?? 0) + 1, cumulative: line.x[before] + step - line.step[before], time };
  return /** @type {Record<string, number>} */ (places)[curve.axis] ?? step;
}

/**
 * Add a row to the end of a line.
 * @param {import("./logic.js").Line} line
 * @param {Row} row
 * @param {Curve} curve
 * @param {[number, number, string][]} nonfinite
 * @param {State} state
 * @param {string} name
 */
function append(line, row, curve, nonfinite, state, name) {
  const step = row[1];
  const [value, low, high] = /** @type {(number | null)[]} */ (valuesOf(row, name));
  const range = nonfinite.at(-1);
  const x = placeOf(line, row, curve, range);
  if (value === null && range && range[1] >= (line.x.at(-1) ?? x)) {
    range[1] = x;
    range[2] = `${range[2].split("–")[0]}–${step.toLocaleString("en")}`;
  } else if (value === null) nonfinite.push([x, x, `NaN ${step.toLocaleString("en")}`]);
  line.x.push(x);
  line.step.push(step);
  line.value.push(value);
  line.low.push(low);
  line.high.push(high);
  line.smoothed.push(value === null ? null : smoothed(line, state, curve.restarts.at(-1) ?? -Infinity));
}

/** Number of values after which older ones have no weight in the average of an average. */
const REACH = 300;

/**
 * Return the average at the end of a line, whose last value is finite.
 * @param {import("./logic.js").Line} line
 * @param {State} state
 * @param {number} restart place of the last restart, at which averages begin again
 * @returns {number | null}
 */
function smoothed(line, state, restart) {
  if (state.smooth === "none") return null;
  const begin = line.x.findLastIndex((x) => x < restart) + 1;
  const finite = (/** @type {number} */ count) => /** @type {number[]} */ (line.value.slice(Math.max(begin, line.value.length - count)).filter((one) => one !== null));
  const mean = (/** @type {number[]} */ values) => values.reduce((sum, one) => sum + one, 0) / values.length;
  if (state.smooth === "average") return mean(finite(state.strength));
  if (state.smooth === "both") return mean(averages(finite(REACH + state.strength), STRENGTH.ema).slice(-state.strength));
  return averages(finite(state.strength <= 0.9 ? REACH : Infinity), state.strength).at(-1) ?? null;
}

/**
 * Return the exponential moving averages of values, each divided by the sum of its weights.
 * @param {number[]} values
 * @param {number} decay
 * @returns {number[]}
 */
function averages(values, decay) {
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    sum = decay * sum + (1 - decay) * value;
    weight = decay * weight + 1 - decay;
    return sum / weight;
  });
}
