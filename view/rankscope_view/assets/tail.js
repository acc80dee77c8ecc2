// Rows of a live run that are not in the store yet: they extend the curves of the server. No function touches the document.

/** @typedef {import("./logic.js").Curve} Curve */
/** @typedef {import("./logic.js").State} State */
/** @typedef {[number, number, number, Record<string, (number | null)[]>]} Row attempt, step, UTC seconds, and by name: mean, lowest, highest, sum */
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
  const line = shown.lines[shown.lines.length - 1];
  for (const row of ownRows(rows.slice(at + 1), curve)) append(line, row, curve, shown.nonfinite, state);
  shown.extent = reaching(shown.extent, line);
  return { curve, choice, shown, last };
}

/**
 * @param {Row[]} rows
 * @param {Curve} curve
 */
function ownRows(rows, curve) {
  return rows.filter((row) => row[0] === curve.attempt && valuesOf(row, curve.name));
}

/**
 * @param {[number, number] | null} extent
 * @param {import("./logic.js").Line} line
 * @returns {[number, number]}
 */
function reaching(extent, line) {
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
  const line = curve.lines.at(-1);
  const own = ownRows(rows, curve);
  if (!line || line.role || curve.lines[0].label?.length === 1 || state.to !== null || !own.length) return curve;
  let end = line.x.length;
  while (end > 0 && line.step[end - 1] >= own[0][1]) end -= 1;
  if (end === 0 || end < line.x.length - KEPT) return curve;
  const next = { ...line };
  for (const name of /** @type {("x" | "step" | "value" | "smoothed" | "low" | "high")[]} */ (["x", "step", "value", "smoothed", "low", "high"])) {
    next[name] = /** @type {any} */ (line[name].slice(0, end));
  }
  /** @type {[number, number, string][]} */ const nonfinite = curve.nonfinite.filter(([first]) => first <= next.x[end - 1]).map(([...range]) => range);
  for (const row of own) append(next, row, curve, nonfinite, state);
  return { ...curve, lines: [...curve.lines.slice(0, -1), next], nonfinite, extent: reaching(curve.extent, next) };
}

/**
 * Add a row to the end of a line.
 * @param {import("./logic.js").Line} line
 * @param {Row} row
 * @param {Curve} curve
 * @param {[number, number, string][]} nonfinite
 * @param {State} state
 */
function append(line, row, curve, nonfinite, state) {
  const [, step, time] = row;
  const [value, low, high] = /** @type {(number | null)[]} */ (valuesOf(row, curve.name));
  const before = line.x.length - 1;
  const places = { arrival: line.x[before] + 1, cumulative: line.x[before] + step - line.step[before], time };
  const x = /** @type {Record<string, number>} */ (places)[curve.axis] ?? step;
  const range = nonfinite.at(-1);
  if (value === null && range && range[1] === line.x[before]) range[1] = x;
  else if (value === null) nonfinite.push([x, x, `NaN ${step.toLocaleString("en")}`]);
  line.x.push(x);
  line.step.push(step);
  line.value.push(value);
  line.low.push(low);
  line.high.push(high);
  line.smoothed.push(value === null ? null : smoothed(line, value, state));
}

/**
 * Return the average at the end of a line, whose newest value is `value`.
 * @param {import("./logic.js").Line} line
 * @param {number} value
 * @param {State} state
 * @returns {number | null}
 */
function smoothed(line, value, state) {
  if (state.smooth === "none") return null;
  if (state.smooth === "average") {
    const values = line.value.slice(-state.strength).filter((one) => one !== null);
    return values.reduce((sum, one) => sum + /** @type {number} */ (one), 0) / values.length;
  }
  const last = line.smoothed.findLast((one) => one !== null) ?? value;
  return state.strength * last + (1 - state.strength) * value;
}
