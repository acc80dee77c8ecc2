// Marks on a heat map: hatched NaN cells, labels, the scale, restarts, the first non-finite cell, and the cursor.
import { layerOf, partOf } from "./cells.js";
import { roundSteps, viridis } from "./logic.js";
import { colour, hatch } from "./marks.js";

/**
 * @typedef {{names: string[], base: number, rows: [number, number, number][], attempts: number[], steps: number[], lastSteps: number[],
 *   scale: [number, number], log: boolean, tensors: number, columns: number, firstBad: [number, number] | null,
 *   notice: string}} Header
 * @typedef {{header: Header | null, cells: Uint8Array, isRanks: boolean, isBins: boolean, cursor: number[], area: () => [number, number, number, number],
 *   holder: (row: number) => string}} HeatView
 */

const NAN = 255;

/**
 * Hatch NaN cells, so that they differ from each colour of the scale.
 * @param {CanvasRenderingContext2D} context
 * @param {HeatView} map
 */
export function bad(context, map) {
  const header = /** @type {Header} */ (map.header);
  const [left, top, wide, high] = map.area();
  const [columns, rows] = [header.steps.length, header.rows.length];
  context.fillStyle = hatch(context, "nan-2", "");
  for (let row = 0; row < rows; row += 1) {
    let start = -1;
    for (let column = 0; column <= columns; column += 1) {
      const isBad = column < columns && map.cells[row * columns + column] === NAN;
      if (isBad && start < 0) start = column;
      if (!isBad && start >= 0) {
        context.fillRect(left + (start / columns) * wide, top + (row / rows) * high, ((column - start) / columns) * wide, high / rows + 0.5);
        start = -1;
      }
    }
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {HeatView} map
 */
export function lines(context, map) {
  const [left, top, wide, high] = map.area();
  const rows = map.header?.rows.length ?? 1;
  context.fillStyle = colour("surface");
  for (let row = 1; row < rows; row += 1) context.fillRect(left, top + (row / rows) * high - 0.75, wide, 1.5);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {HeatView} map
 */
export function labels(context, map) {
  const header = /** @type {Header} */ (map.header);
  const [left, top, wide, high] = map.area();
  const count = header.rows.length;
  context.fillStyle = colour("text-3");
  context.textAlign = "right";
  let last = -99;
  let group = "";
  const order = new URLSearchParams(location.search).get("order");
  const [start, end] = map.isRanks ? [0, 0] : common(header.names);
  header.rows.forEach(([first], row) => {
    const name = header.names[first];
    const word = map.isRanks || map.isBins || header.names.length <= 30 ? name : order === "part" ? partOf(name) : layerOf(name);
    const y = top + ((row + 0.5) / count) * high + 4;
    if (word === group || y - last < 14) return;
    [group, last] = [word, y];
    context.fillText(clipped(context, word === name ? name.slice(start, name.length - end) : word, left - 10), left - 6, y);
  });
  context.fillText("step", left - 22, top + high + 15);
  context.textAlign = "center";
  for (const column of roundSteps(header.steps, Math.max(2, wide / 90))) {
    context.fillText(header.steps[column].toLocaleString("en"), left + ((column + 0.5) / header.steps.length) * wide, top + high + 15);
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {HeatView} map
 */
export function legend(context, map) {
  const header = /** @type {Header} */ (map.header);
  const [left, top, wide, high] = map.area();
  const x = left + wide + 12;
  const bar = Math.max(30, high - (map.isRanks ? 26 : 66));
  for (let at = 0; at < bar; at += 1) {
    const [red, green, blue] = viridis(1 - at / bar);
    context.fillStyle = `rgb(${red},${green},${blue})`;
    context.fillRect(x, top + at, 12, 1.5);
  }
  context.textAlign = "left";
  context.fillStyle = colour("text-3");
  const [low, most] = header.scale;
  const isRelative = !map.isRanks && !map.isBins && !isAbsolute();
  // Step times have no decades; 1 is the median rank.
  const scale = header.log ? Array.from({ length: Math.floor(most) - Math.ceil(low) + 1 }, (_, at) => Math.ceil(low) + at) : map.isRanks ? [1, 1.1, 1.2, 1.3] : [low, (low + most) / 2, most];
  const inside = scale.filter((step) => step >= low && step <= most);
  /** @type {number[]} */ const taken = []; // places of labels, of which none covers another
  for (const step of new Set([...(inside.length > 1 ? [inside[0], inside[inside.length - 1], ...inside] : [low, most])])) {
    const y = Math.min(Math.max(top + bar - ((step - low) / (most - low || 1)) * bar + 4, top + 9), top + bar);
    if (taken.some((one) => Math.abs(one - y) < 13)) continue;
    taken.push(y);
    const value = header.log ? 10 ** step : step;
    const word = `${Number(value.toPrecision(3))}${isRelative || map.isRanks ? "×" : ""}`;
    context.fillText(word, x + 16, y);
  }
  const keys = map.isRanks ? [["absent", ""]] : [["NaN", "nan"], ["Inf", "inf"], ["absent", ""]];
  keys.forEach(([word, name], at) => {
    const y = top + bar + 10 + at * 19;
    context.fillStyle = name ? colour(name) : hatch(context, "absent", "sunken");
    context.fillRect(x, y, 12, 11);
    if (name === "nan") {
      context.fillStyle = hatch(context, "nan-2", "");
      context.fillRect(x, y, 12, 11);
    }
    context.fillStyle = colour("text-3");
    context.fillText(word, x + 16, y + 10);
  });
}

/**
 * Draw restarts, the first non-finite cell with its name, and the cursor.
 * @param {CanvasRenderingContext2D} context
 * @param {HeatView} map
 */
export function marks(context, map) {
  const header = /** @type {Header} */ (map.header);
  const [left, top, wide, high] = map.area();
  const [columns, rows] = [header.steps.length, header.rows.length];
  context.strokeStyle = "#fff";
  context.setLineDash([4, 3]);
  header.attempts.forEach((attempt, column) => {
    if (column === 0 || attempt === header.attempts[column - 1]) return;
    context.beginPath();
    context.moveTo(left + (column / columns) * wide, top);
    context.lineTo(left + (column / columns) * wide, top + high);
    context.stroke();
  });
  context.setLineDash([]);
  if (header.firstBad) {
    const [row, column] = header.firstBad;
    const [x, y] = [left + ((column + 0.5) / columns) * wide, top + ((row + 0.5) / rows) * high];
    context.strokeStyle = "#fff";
    context.lineWidth = 1.5;
    context.beginPath();
    context.arc(x, y, 5, 0, 7);
    context.stroke();
    const end = ` · step ${header.steps[column].toLocaleString("en")}`;
    const room = left + wide - context.measureText(`first NaN: ${end}`).width - 18;
    const word = `first NaN: ${clipped(context, map.holder(row), room)}${end}`;
    const width = context.measureText(word).width + 14;
    // The callout is to the right, so that it does not cover what led to the value.
    const at = Math.max(0, Math.min(x + 26, left + wide - width));
    context.beginPath();
    context.moveTo(x + 5, y - 2);
    const beside = y < 36 ? y + 21 : y - 21;
    context.lineTo(at, beside);
    context.stroke();
    context.fillStyle = "#101317";
    context.fillRect(at, beside - 10, width, 20);
    context.fillStyle = "#fff";
    context.textAlign = "left";
    context.fillText(word, at + 7, beside + 4);
  }
  const [row, column] = map.cursor;
  if (row >= 0) {
    context.strokeStyle = "#fff";
    context.lineWidth = 1;
    context.strokeRect(left, top + (row / rows) * high, wide, Math.max(2, high / rows));
    context.strokeRect(left + (column / columns) * wide, top, Math.max(1.5, wide / columns), high);
  }
}

/** Return whether colours show values instead of their ratio to the median of the tensor. */
export function isAbsolute() {
  return Boolean(new URLSearchParams(location.search).get("absolute"));
}

/**
 * Return the lengths of the beginning and the end that all names share, in whole parts: they distinguish none of them.
 * @param {string[]} names
 * @returns {[number, number]}
 */
export function common(names) {
  const parts = names.map((name) => name.split("."));
  const [one] = parts;
  const most = Math.min(...parts.map((part) => part.length)) - 1;
  const shared = (/** @type {(part: string[], at: number) => string} */ of) => {
    let count = 0;
    while (names.length > 1 && count < most && parts.every((part) => of(part, count) === of(one, count))) count += 1;
    return count;
  };
  const first = shared((part, at) => part[at]);
  const last = Math.min(shared((part, at) => part[part.length - 1 - at]), most - first);
  const length = (/** @type {string[]} */ some) => some.reduce((sum, part) => sum + part.length + 1, 0);
  return [length(one?.slice(0, first) ?? []), last > 0 ? length(one.slice(-last)) : 0];
}

/**
 * Return a name that fits into a width: its inner parts are cut to three letters one after the other, then its middle.
 * @param {{measureText: (text: string) => {width: number}}} context
 * @param {string} word
 * @param {number} width
 */
export function clipped(context, word, width) {
  const fits = (/** @type {string} */ text) => context.measureText(text).width <= width;
  const parts = word.split(".");
  for (let at = 0; at < parts.length - 1 && !fits(parts.join(".")); at += 1) parts[at] = parts[at].slice(0, 3);
  const name = parts.join(".");
  if (fits(name)) return name;
  const short = (/** @type {number} */ length) => `${name.slice(0, Math.floor(length / 2))}…${name.slice(-Math.ceil(length / 2))}`;
  let length = name.length - 1;
  while (length > 4 && !fits(short(length))) length -= 1;
  return short(length);
}
