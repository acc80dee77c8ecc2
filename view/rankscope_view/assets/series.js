// The lines of a chart: which arrays of a curve are drawn, in which style. No function touches the document.
import { byteSize, shown, valueAt } from "./logic.js";

/** @typedef {import("./logic.js").Curve} Curve */
/** @typedef {import("./logic.js").Line} Line */
/**
 * @typedef {"edge" | "behind" | "raw" | "main" | "other" | "baseline" | "limit"} Style
 * @typedef {{x: number[], y: (number | null)[], style: Style, colour: string, label: string}} Series
 */

export const COLOURS = ["s1", "s2", "s3", "s4", "s5", "s6"];

/**
 * Return the series of a curve. A sole line has edges of its range, if it has one; a training loss is behind evaluations; each other line has a strong series of its values and a light one of their average.
 * @param {Curve} curve
 * @returns {Series[]}
 */
export function seriesOf(curve) {
  const behind = curve.lines.filter((line) => line.role === "training");
  if (behind.length) {
    const own = seriesOf({ ...curve, lines: curve.lines.filter((line) => line.role !== "training") });
    const word = (/** @type {Series} */ one) => (one.label === "value" ? { ...one, label: "evaluation" } : one);
    return [...behind.map((line) => /** @type {Series} */ ({ x: line.x, y: line.value, style: "behind", colour: "text-3", label: line.label ?? "" })), ...own.map(word)];
  }
  if (curve.lines.some((line) => line.role)) return curve.lines.flatMap(ofTensor);
  if (curve.lines.some((line) => line.label)) {
    return curve.lines.flatMap((line, at) => {
      const name = COLOURS[numberOf(line, at) % COLOURS.length];
      return pair(line, name, `${name}-faded`, line.label ?? "");
    });
  }
  const line = curve.lines[0] ?? { x: [], step: [], value: [], smoothed: [], low: [], high: [], label: null };
  return [...edges(line), ...pair(line, "s1", "raw", "value")];
}

/**
 * Return the number of the side of a comparison that a line shows, from its letter; of other lines, the number `at`.
 * @param {Line} line
 * @param {number} at
 */
function numberOf(line, at) {
  return /^[A-F]( |$)/.test(line.label ?? "") ? (line.label ?? "").charCodeAt(0) - 65 : at;
}

/**
 * Return the range of values of a series that are not finite, at the place `x` or, if it is null, at the end.
 * @param {Curve} curve
 * @param {Series} series
 * @param {number | null} x
 */
export function badRange(curve, series, x) {
  if (series.style === "behind") return undefined;
  const sole = curve.lines.filter((line) => line.role !== "training").length < 2;
  const isOwn = (/** @type {string} */ word) => {
    const owner = / of (.*) [^ ]*$/.exec(word)?.[1];
    return owner === undefined ? sole : owner === series.label;
  };
  return curve.nonfinite.findLast(([first, last, word]) => isOwn(word) && (x === null ? last >= (series.x.at(-1) ?? last) : first <= x && x <= last));
}

/**
 * Return the text of the value of a series at the place `x`, to which a reader points or at which its axis ends: `NaN` in a range of values that are not finite, and `–` after the end of the series. A range of many rows can contain finite ones.
 * @param {Curve} curve
 * @param {Series} series
 * @param {number} x
 * @param {boolean} isPointed
 */
export function valueText(curve, series, x, isPointed) {
  const bad = badRange(curve, series, isPointed ? x : null);
  const [before, end] = [series.x.at(-2) ?? -Infinity, series.x.at(-1) ?? x];
  const isAbsent = (bad && !(isPointed && series.x.includes(x))) || (isPointed && x - end > end - before);
  const value = isAbsent ? null : valueAt(series, x);
  return value === null && bad ? bad[2].replace(/( of .*)? [^ ]*$/, "") : value !== null && curve.name?.endsWith("_bytes") ? byteSize(value) : shown(value);
}

/**
 * Return the places of values between gaps, such as the only one of an attempt, which no line shows; null without any. An
 * undefined value is that of a place of other series.
 * @param {(number | null | undefined)[]} values
 */
export function alone(values) {
  const known = [...values.keys()].filter((at) => values[at] !== undefined);
  const found = known.filter((at, place) => values[at] !== null && [known[place - 1], known[place + 1]].every((near) => (values[near] ?? null) === null));
  return found.length ? found : null;
}

/**
 * Return whether any value of a series exists.
 * @param {Series} series
 */
export function isDrawn(series) {
  return series.y.some((one) => one !== null);
}

/**
 * @param {Line} line
 * @returns {Series[]}
 */
function edges(line) {
  if (!line.high.some((one, at) => one !== null && one !== line.low[at])) return [];
  return [line.low, line.high].map((y) => ({ x: line.x, y, style: "edge", colour: "band", label: "" }));
}

/**
 * @param {Line} line
 * @param {string} colour
 * @param {string} faded colour of an average over the values
 * @param {string} label
 * @returns {Series[]}
 */
function pair(line, colour, faded, label) {
  const isSmooth = line.smoothed.some((one) => one !== null);
  /** @type {Series} */ const raw = { x: line.x, y: line.value, style: "raw", colour, label };
  return isSmooth ? [raw, { x: line.x, y: line.smoothed, style: "main", colour: faded, label }] : [raw];
}

/**
 * @param {Line} line
 * @returns {Series[]}
 */
function ofTensor(line) {
  const [x, y, label] = [line.x, line.value, line.label ?? ""];
  if (line.role === "subject") return [...edges(line), { x, y, style: "main", colour: "s1", label }];
  if (line.role === "baseline") return [{ x, y, style: "baseline", colour: "s3", label }];
  if (line.role === "limit") return [{ x, y, style: "limit", colour: "failed", label }];
  return [{ x, y, style: "other", colour: "s6", label }];
}

/**
 * Return the bands between series, as pairs of their numbers: the range of ranks, and the range that a rule allows.
 * @param {Series[]} series
 * @returns {[number, number, string][]}
 */
export function bandsOf(series) {
  const at = (/** @type {Style} */ style) => series.flatMap((one, number) => (one.style === style ? [number] : []));
  const [edge, limit, baseline] = [at("edge"), at("limit"), at("baseline")];
  /** @type {[number, number, string][]} */ const found = [];
  if (edge.length === 2 && !at("other").length) found.push([edge[1], edge[0], "band"]);
  if (limit.length) found.push([limit[0], limit[1] ?? baseline[0] ?? limit[0], "allowed"]);
  return found;
}
