// Pure functions of the pages: the address, labels of axes, data of charts, colours. No function touches the document.

/**
 * @typedef {{axis: string, smooth: string, strength: number, from: number | null, to: number | null,
 *   log: boolean, cut: boolean, tail: number}} State
 * @typedef {{label: string | null, x: number[], step: number[], value: (number | null)[], smoothed: (number | null)[],
 *   low: (number | null)[], high: (number | null)[], role?: string | null, key?: string | null}} Line
 * @typedef {{name: string, axis: string, lines: Line[], nonfinite: [number, number, string][], restarts: number[],
 *   rows: number, buckets: number, extent: [number, number] | null, bulk: [number, number] | null, notice: string,
 *   firings?: [number, number | null, string][], attempt?: number, markers?: [string, number, number, string, boolean][]}} Curve
 * @typedef {{label: string | null, x: number[], step: number[] | null, value: (number | null)[],
 *   smoothed: (number | null)[] | null, low: (number | null)[] | null, high: (number | null)[] | null}} KeptLine
 * @typedef {Omit<Curve, "lines"> & {lines: KeptLine[]}} Kept
 */

// A formatter is made once, because making one costs as much as drawing a chart.
const GROUPED = new Intl.NumberFormat("en");
const WITH_TENTH = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const EXACT = new Intl.NumberFormat("en", { maximumFractionDigits: 8 });

/**
 * Return a whole number with separators.
 * @param {number} value
 */
export function grouped(value) {
  return GROUPED.format(value);
}

/** @type {Record<string, number>} Default strength by kind of smoothing. */
export const STRENGTH = { ema: 0.9, average: 20, both: 20, none: 0 };

/**
 * Return the choices that an address contains.
 * @param {string} search
 * @param {string} usual the axis of an address without one
 * @returns {State}
 */
export function readState(search, usual = "step") {
  const query = new URLSearchParams(search);
  const smooth = ["none", "ema", "average", "both"].find((one) => one === query.get("smooth")) ?? "ema";
  const strength = Number(query.get("strength") ?? NaN);
  return {
    axis: ["step", "cumulative", "attempt", "arrival", "time"].find((one) => one === query.get("axis")) ?? usual,
    smooth,
    strength: Number.isFinite(strength) ? strength : STRENGTH[smooth],
    from: finite(query.get("from")),
    to: finite(query.get("to")),
    log: Boolean(query.get("log")),
    cut: Boolean(query.get("cut")),
    tail: Number(query.get("tail")) || 0,
  };
}

/**
 * @param {string | null} word
 * @returns {number | null}
 */
function finite(word) {
  const value = Number(word ?? NaN);
  return Number.isFinite(value) ? value : null;
}

/**
 * Return the query of an address with the choices that are not the default.
 * @param {State} state
 * @param {string} usual the axis that is left out
 * @returns {string}
 */
export function writeState(state, usual = "step") {
  const query = new URLSearchParams();
  if (state.axis !== usual) query.set("axis", state.axis);
  if (state.smooth !== "ema") query.set("smooth", state.smooth);
  if (state.strength !== STRENGTH[state.smooth]) query.set("strength", String(state.strength));
  if (state.from !== null) query.set("from", String(state.from));
  if (state.to !== null) query.set("to", String(state.to));
  for (const name of /** @type {("log" | "cut")[]} */ (["log", "cut"])) if (state[name]) query.set(name, "1");
  if (state.tail) query.set("tail", String(state.tail));
  return query.toString();
}

/**
 * Return the query of an address in which the choices of charts are replaced by those of `state`; others remain.
 * @param {string} search
 * @param {State} state
 * @param {string} usual
 * @returns {string}
 */
export function replaceState(search, state, usual = "step") {
  const query = new URLSearchParams(search);
  for (const name of ["axis", "smooth", "strength", "from", "to", "log", "cut", "tail"]) query.delete(name);
  for (const [name, value] of new URLSearchParams(writeState(state, usual))) query.set(name, value);
  return query.toString();
}

/**
 * Return a measured value with four digits, NaN and absent values as words.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size < 1000) return value.toPrecision(4);
  return size >= 10_000 ? GROUPED.format(Math.round(value)) : WITH_TENTH.format(value);
}

/**
 * Return a number of bytes with a binary unit, as of memory.
 * @param {number} bytes
 * @returns {string}
 */
export function byteSize(bytes) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.abs(bytes) || 1) / 10)));
  return `${EXACT.format(Number((bytes / 1024 ** power).toPrecision(4)))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/**
 * Return a duration as text in its two largest units, as the server does.
 * @param {number} seconds
 * @returns {string}
 */
export function duration(seconds) {
  if (seconds > 1000 * 365.25 * 86_400) return "over 1,000 years";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  for (const [size, unit, smaller, small] of /** @type {[number, string, number, string][]} */ ([[86_400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]])) {
    const rest = Math.floor((whole % size) / smaller);
    if (whole >= size) return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${small}` : ""}`;
  }
  return `${whole} s`;
}

/**
 * Return a large number with three digits and a factor, such as `625 k` or `1.2 M`, as the server does.
 * @param {number} value
 * @returns {string}
 */
export function short(value) {
  for (const [size, factor] of /** @type {[number, string][]} */ ([[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${factor}`;
  }
  return String(Number(value.toPrecision(3)));
}

/**
 * Return the label of a tick. Labels are never rounded to fewer digits than the tick has.
 * @param {number} value
 * @returns {string}
 */
export function tickLabel(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return String(Number(value.toPrecision(6)).toExponential()).replace("e+", "e");
  if (size >= 10_000) return `${GROUPED.format(Number((value / 1000).toPrecision(6)))} k`;
  return EXACT.format(Number(value.toPrecision(8)));
}

/**
 * Return the label of a place on the axis: a raw step, a count, or a time in UTC.
 * @param {Curve} curve
 * @param {number} x
 * @param {number} span length of the visible part of the axis
 * @returns {string}
 */
export function placeLabel(curve, x, span) {
  if (curve.axis === "time") {
    const text = new Date(x * 1000).toISOString();
    return span > 172_800 ? text.slice(5, 10) : text.slice(11, span < 600 ? 19 : 16);
  }
  if (curve.axis !== "arrival") return GROUPED.format(Math.round(x));
  const line = curve.lines[0];
  if (!line || !line.x.length) return "";
  return GROUPED.format(line.step[nearest(line.x, x)]);
}

/**
 * Return the columns with round steps, about `wanted` of them. Steps may go back at a restart.
 * @param {number[]} steps
 * @param {number} wanted
 * @returns {number[]}
 */
export function roundSteps(steps, wanted) {
  const span = Math.max(steps[steps.length - 1] - steps[0], 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(span / wanted, 1)));
  const width = [1, 2, 5, 10].map((factor) => factor * power).find((one) => span / one <= wanted) ?? power * 10;
  /** @type {number[]} */ const found = [];
  const distance = steps.length / wanted / 2;
  steps.forEach((step, at) => {
    const before = at ? steps[at - 1] : step - 1;
    const isRound = step % width === 0 || (step > before && Math.floor(step / width) !== Math.floor(before / width));
    if (isRound && (!found.length || at - found[found.length - 1] >= distance)) found.push(at);
  });
  return found;
}

/**
 * Return the places of round steps on an axis of arrival, about `wanted` of them.
 * @param {Curve | null} curve
 * @param {number[]} window
 * @param {number} wanted
 * @returns {number[]}
 */
export function stepSplits(curve, window, wanted) {
  const line = curve?.lines[0];
  if (!line) return [];
  const span = window[1] - window[0];
  const power = 10 ** Math.floor(Math.log10(Math.max(span / wanted, 1)));
  const width = [1, 2, 5, 10].map((factor) => factor * power).find((one) => span / one <= wanted) ?? power;
  /** @type {number[]} */ const found = [];
  line.x.forEach((x, at) => {
    const isFar = !found.length || x - found[found.length - 1] >= width / 3;
    if (isFar && line.step[at] % width === 0 && x >= window[0] && x <= window[1] && line.value[at] !== null) found.push(x);
  });
  return found;
}

/**
 * Return the index of the value that is nearest to `x` in sorted `values`.
 * @param {number[]} values
 * @param {number} x
 * @returns {number}
 */
export function nearest(values, x) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle;
    else high = middle;
  }
  return x - values[low] <= values[high] - x ? low : high;
}

/**
 * Return the value of a series at the place that is nearest to `x`; null without any.
 * @param {{x: number[], y: (number | null)[]}} series
 * @param {number} x
 * @returns {number | null}
 */
export function valueAt(series, x) {
  return series.x.length ? series.y[nearest(series.x, x)] : null;
}

/**
 * Return the range of the y axis: all values and the band over ranks, or most values if the axis is cut, with a margin.
 * @param {Curve} curve
 * @param {{log: boolean, cut: boolean, zero: boolean}} choice
 * @returns {[number, number]}
 */
export function valueRange(curve, choice) {
  let [low, high] = curve.bulk ?? [0, 1];
  if (!choice.cut || choice.log) {
    [low, high] = [Infinity, -Infinity];
    const hasBand = curve.lines.filter((line) => line.role !== "training").length === 1;
    for (const line of curve.lines) {
      for (const one of [...line.value, ...(hasBand ? [...line.low, ...line.high] : [])]) {
        if (one === null || (choice.log && one <= 0)) continue;
        if (one < low) low = one;
        if (one > high) high = one;
      }
    }
    if (!Number.isFinite(low)) [low, high] = choice.log ? [0.1, 10] : [0, 1];
  }
  if (choice.log) return low === high ? [low / 10, high * 10] : [low / 1.3, high * 1.3];
  if (choice.zero && low >= 0) return [0, high * 1.08 || 1];
  if (choice.zero) [low, high] = [low, Math.max(high, 0)];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.5 || 1;
  return [low - margin, high + margin];
}

/** e^20. A model that knows nothing of 1,000,000 tokens has a perplexity of 1e6. */
const LARGEST_PERPLEXITY = Math.exp(20);

/**
 * Return the range of the logarithmic axis of a perplexity with values above LARGEST_PERPLEXITY, which are at its edge; null without such values. After a spike of the loss, an axis with all values of its exponential would show nothing else.
 * @param {Curve} curve
 * @returns {[number, number] | null}
 */
export function perplexityRange(curve) {
  const [low, high] = valueRange(curve, { log: true, cut: false, zero: false });
  return high > 1.3 * LARGEST_PERPLEXITY ? [low, Math.max(LARGEST_PERPLEXITY, 10 * low)] : null;
}

/**
 * Return the ticks of a logarithmic axis: at most seven decades, and within two decades also 2 and 5.
 * @param {number[]} range
 */
export function logTicks([low, high]) {
  const step = Math.ceil(Math.log10(high / low) / 6);
  const parts = high / low < 100 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += step) found.push(...parts.map((one) => one * 10 ** power));
  return found.filter((one) => one >= low && one <= high);
}

/**
 * Return the rows of a table in the order of `before`, so that they do not change places, below the new rows.
 * @param {string[]} before
 * @param {string[]} after
 * @returns {string[]}
 */
export function keptOrder(before, after) {
  const present = new Set(after);
  const known = new Set(before);
  return [...after.filter((one) => !known.has(one)), ...before.filter((one) => present.has(one))];
}

const VIRIDIS = ["440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6dcd59", "b4de2c", "fde725"];

/**
 * Return the colour of a share from 0 to 1 of the scale viridis.
 * @param {number} share
 * @returns {[number, number, number]}
 */
export function viridis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const part = (/** @type {number} */ index, /** @type {number} */ at) => parseInt(VIRIDIS[index].slice(at, at + 2), 16);
  const mix = (/** @type {number} */ at) => Math.round(part(low, at) + (part(low + 1, at) - part(low, at)) * (place - low));
  return [mix(0), mix(2), mix(4)];
}

/**
 * Return a curve as the server sends it, from its form in a report, which leaves out equal columns.
 * @param {Kept} kept
 * @param {boolean} isSmooth
 * @returns {Curve}
 */
export function expanded(kept, isSmooth) {
  const lines = kept.lines.map((line) => ({
    ...line,
    step: line.step ?? line.x,
    smoothed: (isSmooth ? line.smoothed : null) ?? line.value.map(() => null),
    low: line.low ?? line.value,
    high: line.high ?? line.value,
  }));
  return { ...kept, lines };
}

/**
 * Return the part of a curve in a zoom window, with one point on each side of it. The range is that of its values.
 * @param {Curve} curve
 * @param {{from: number | null, to: number | null}} window
 * @returns {Curve}
 */
export function sliced(curve, window) {
  if (window.from === null && window.to === null) return curve;
  const [from, to] = [window.from ?? -Infinity, window.to ?? Infinity];
  let points = 0;
  let [low, high] = [Infinity, -Infinity];
  const lines = curve.lines.map((line) => {
    const inside = line.x.findIndex((x) => x >= from);
    const first = Math.max(0, (inside < 0 ? line.x.length : inside) - 1);
    const after = line.x.findIndex((x) => x > to);
    const part = (/** @type {any[]} */ column) => column.slice(first, after < 0 ? undefined : after + 1);
    const value = /** @type {(number | null)[]} */ (part(line.value));
    for (const one of value) {
      if (one === null) continue;
      points += 1;
      [low, high] = [Math.min(low, one), Math.max(high, one)];
    }
    return { ...line, x: part(line.x), step: part(line.step), value, smoothed: part(line.smoothed), low: part(line.low), high: part(line.high) };
  });
  const bulk = /** @type {[number, number] | null} */ (low <= high ? [low, high] : null);
  const notice = `${points.toLocaleString("en")} points of the report in this window; ${curve.notice}`;
  return { ...curve, lines, bulk, notice };
}

/**
 * Return the points of a curve as CSV.
 * @param {Curve} curve
 * @returns {string}
 */
export function csv(curve) {
  const head = `line,step,${curve.axis},${curve.name},smoothed,lowest,highest`;
  const rows = curve.lines.flatMap((line, number) =>
    line.x.map((x, at) => [line.label ?? number, line.step[at], x, line.value[at], line.smoothed[at], line.low[at], line.high[at]].map((one) => one ?? "").join(",")),
  );
  return [head, ...rows, ""].join("\n");
}
