// Heat maps on a canvas: all tensors over the steps of a run, or the step times of all ranks.
import { colour, hatch } from "./marks.js";
import { layerOf, partOf, poolColumns } from "./cells.js";
import { roundSteps, shown, viridis } from "./logic.js";

/**
 * @typedef {{names: string[], base: number, rows: [number, number, number][], attempts: number[], steps: number[], lastSteps: number[],
 *   scale: [number, number], log: boolean, tensors: number, columns: number, firstBad: [number, number] | null,
 *   notice: string}} Header
 */

const base = document.body.dataset.base ?? "";
const [ABSENT, INFINITE, NAN, LEVELS] = [253, 254, 255, 250];
const LEFT = 96;
const RIGHT = 74;
const BOTTOM = 22;

class HeatMap {
  /** @param {HTMLElement} box */
  constructor(box) {
    this.box = box;
    this.isRanks = box.dataset.source === "ranks";
    this.canvas = document.createElement("canvas");
    box.replaceChildren(this.canvas);
    /** @type {Header | null} */ this.header = null;
    this.cells = new Uint8Array();
    this.cursor = [-1, -1];
    /** @type {HTMLCanvasElement | null} */ this.image = null;
    /** @type {Header | null} */ this.painted = null;
    this.timer = 0;
    this.drag = -1;
    this.isLate = false;
    setTimeout(() => {
      this.isLate = true;
      if (!this.header) this.draw();
    }, 150);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.moved(-1, -1));
    this.canvas.addEventListener("pointerdown", (event) => (this.drag = this.cell(event)[1]));
    this.canvas.addEventListener("pointerup", (event) => this.released(event));
    box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  /**
   * Return the names and values of a request: the grid has at most one cell for each pixel.
   * @returns {[string, string][]}
   */
  choices() {
    const high = this.area()[3];
    const own = ["run", "kind", "op", "rank", "whole"].map((name) => /** @type {[string, string]} */ ([name, this.box.dataset[name] ?? ""]));
    const size = Math.max(1, devicePixelRatio);
    return [...own.filter(([, value]) => value), ["height", String(Math.round(high * size))]];
  }

  /**
   * Return the name of the tensor with the extreme of a row.
   * @param {number} row
   */
  holder(row) {
    const header = /** @type {Header} */ (this.header);
    return header.names[header.rows[row][2]];
  }

  async load() {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of this.choices()) query.set(name, value);
    const answer = await fetch(`${base}/data/${this.box.dataset.source}?${query}`);
    if (!answer.ok) throw new Error(String(answer.status));
    const bytes = await answer.arrayBuffer();
    const length = new DataView(bytes).getUint32(0, true);
    this.header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
    this.cells = new Uint8Array(bytes, 4 + length);
    if (this.isRanks && this.header) this.box.style.height = `${Math.max(90, Math.min(480, this.header.rows.length * 16 + BOTTOM + 8))}px`;
    const notice = document.getElementById("gridnotice");
    if (notice && this.header && !this.isRanks) notice.textContent = this.header.notice;
    this.draw();
  }

  /**
   * Paint the cells, one pixel each. Columns that share a pixel of the screen show the cell that is farthest from the median.
   * @param {number} most largest number of columns
   */
  paint(most) {
    const header = this.header;
    if (!header || !header.rows.length) return;
    const columns = Math.min(header.steps.length, most);
    if (this.image?.width === columns && this.painted === header) return;
    this.painted = header;
    const image = document.createElement("canvas");
    [image.width, image.height] = [columns, header.rows.length];
    const context = /** @type {CanvasRenderingContext2D} */ (image.getContext("2d"));
    const pixels = context.createImageData(image.width, image.height);
    const words = new Uint32Array(pixels.data.buffer);
    const colours = Array.from({ length: 256 }, (_, code) => packed(code));
    const middle = isAbsolute() ? 0 : (-header.scale[0] / (header.scale[1] - header.scale[0])) * LEVELS;
    const cells = poolColumns(this.cells, header.rows.length, columns, middle);
    for (let at = 0; at < cells.length; at += 1) words[at] = colours[cells[at]];
    context.putImageData(pixels, 0, 0);
    this.image = image;
  }

  /** @returns {[number, number, number, number]} */
  area() {
    return [LEFT, 4, Math.max(20, this.box.clientWidth - 24 - LEFT - RIGHT), Math.max(20, this.box.clientHeight - BOTTOM - 8)];
  }

  draw() {
    const header = this.header;
    const ratio = devicePixelRatio;
    const [width, height] = [this.box.clientWidth - 24, this.box.clientHeight];
    if (width < 10) return;
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    const context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    context.scale(ratio, ratio);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = colour("text-3");
    const [left, top, wide, high] = this.area();
    this.paint(Math.floor(wide * ratio));
    if (!header || !this.image) {
      context.fillText(header ? header.notice : this.isLate ? "Loading …" : "", LEFT, 40);
      return;
    }
    context.fillStyle = hatch(context, "line-2", "sunken");
    context.fillRect(left, top, wide, high);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, left, top, wide, high);
    this.bad(context);
    if (this.isRanks) this.lines(context);
    this.labels(context);
    this.legend(context);
    this.marks(context);
  }

  /**
   * Hatch NaN cells, so that they differ from each colour of the scale.
   * @param {CanvasRenderingContext2D} context
   */
  bad(context) {
    const header = /** @type {Header} */ (this.header);
    const [left, top, wide, high] = this.area();
    const [columns, rows] = [header.steps.length, header.rows.length];
    context.fillStyle = hatch(context, "nan-2", "");
    for (let row = 0; row < rows; row += 1) {
      let start = -1;
      for (let column = 0; column <= columns; column += 1) {
        const isBad = column < columns && this.cells[row * columns + column] === NAN;
        if (isBad && start < 0) start = column;
        if (!isBad && start >= 0) {
          context.fillRect(left + (start / columns) * wide, top + (row / rows) * high, ((column - start) / columns) * wide, high / rows + 0.5);
          start = -1;
        }
      }
    }
  }

  /** @param {CanvasRenderingContext2D} context */
  lines(context) {
    const [left, top, wide, high] = this.area();
    const rows = this.header?.rows.length ?? 1;
    context.fillStyle = colour("surface");
    for (let row = 1; row < rows; row += 1) context.fillRect(left, top + (row / rows) * high - 0.75, wide, 1.5);
  }

  /** @param {CanvasRenderingContext2D} context */
  labels(context) {
    const header = /** @type {Header} */ (this.header);
    const [left, top, wide, high] = this.area();
    const count = header.rows.length;
    context.fillStyle = colour("text-3");
    context.textAlign = "right";
    let last = -99;
    let group = "";
    const order = new URLSearchParams(location.search).get("order");
    header.rows.forEach(([first], row) => {
      const name = header.names[first];
      const word = this.isRanks || header.names.length <= 30 ? name : order === "part" ? partOf(name) : layerOf(name);
      const y = top + ((row + 0.5) / count) * high + 4;
      if (word === group || y - last < 12) return;
      [group, last] = [word, y];
      context.fillText(clipped(context, word, left - 10), left - 6, y);
    });
    context.textAlign = "center";
    for (const column of roundSteps(header.steps, Math.max(2, wide / 90))) {
      context.fillText(header.steps[column].toLocaleString("en"), left + ((column + 0.5) / header.steps.length) * wide, top + high + 15);
    }
  }

  /** @param {CanvasRenderingContext2D} context */
  legend(context) {
    const header = /** @type {Header} */ (this.header);
    const [left, top, wide, high] = this.area();
    const x = left + wide + 12;
    const bar = Math.max(30, high - (this.isRanks ? 26 : 66));
    for (let at = 0; at < bar; at += 1) {
      const [red, green, blue] = viridis(1 - at / bar);
      context.fillStyle = `rgb(${red},${green},${blue})`;
      context.fillRect(x, top + at, 12, 1.5);
    }
    context.textAlign = "left";
    context.fillStyle = colour("text-3");
    const [low, most] = header.scale;
    const isRelative = !this.isRanks && !isAbsolute();
    const steps = header.log ? Array.from({ length: Math.floor(most) - Math.ceil(low) + 1 }, (_, at) => Math.ceil(low) + at) : [low, (low + most) / 2, most];
    for (const step of steps) {
      const value = header.log ? 10 ** step : step;
      const word = `${Number(value.toPrecision(3))}${isRelative || this.isRanks ? "×" : ""}`;
      context.fillText(word, x + 16, Math.min(Math.max(top + bar - ((step - low) / (most - low)) * bar + 4, top + 9), top + bar));
    }
    const keys = this.isRanks ? [["absent", ""]] : [["NaN", "nan"], ["Inf", "inf"], ["absent", ""]];
    keys.forEach(([word, name], at) => {
      const y = top + bar + 10 + at * 19;
      context.fillStyle = name ? colour(name) : hatch(context, "line-2", "sunken");
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
   */
  marks(context) {
    const header = /** @type {Header} */ (this.header);
    const [left, top, wide, high] = this.area();
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
      const word = `first NaN: ${clipped(context, this.holder(row), room)}${end}`;
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
    const [row, column] = this.cursor;
    if (row >= 0) {
      context.strokeStyle = "#fff";
      context.lineWidth = 1;
      context.strokeRect(left, top + (row / rows) * high, wide, Math.max(2, high / rows));
      context.strokeRect(left + (column / columns) * wide, top, Math.max(1.5, wide / columns), high);
    }
  }

  /**
   * @param {PointerEvent} event
   * @returns {[number, number]}
   */
  cell(event) {
    const header = this.header;
    const [left, top, wide, high] = this.area();
    const [x, y] = [event.offsetX - left, event.offsetY - top];
    if (!header || x < 0 || y < 0 || x >= wide || y >= high) return [-1, -1];
    return [Math.floor((y / high) * header.rows.length), Math.floor((x / wide) * header.steps.length)];
  }

  /** @param {PointerEvent} event */
  point(event) {
    this.moved(...this.cell(event));
  }

  /**
   * Move the cursor, and show the exact value of its cell after a pause.
   * @param {number} row
   * @param {number} column
   */
  moved(row, column) {
    if (row === this.cursor[0] && column === this.cursor[1]) return;
    this.cursor = [row, column];
    requestAnimationFrame(() => this.draw());
    clearTimeout(this.timer);
    const header = this.header;
    if (!header || row < 0) return;
    const facts = [["", this.isRanks || header.rows[row][1] === 1 ? this.holder(row) : this.pooled(row)], ["step", stepWord(header, column)], ["attempt", String(header.attempts[column])]];
    if (this.isRanks) readout([...facts, ["against the median", this.levelWord(row, column)]]);
    else {
      readout(facts);
      this.timer = setTimeout(() => void this.exact(row, column), 120);
    }
  }

  /**
   * Return the names of the tensors that a row combines, from the first to the last one.
   * @param {number} row
   */
  pooled(row) {
    const { rows, names } = /** @type {Header} */ (this.header);
    const [first, count] = rows[row];
    return `${count} tensors, ${names[first]} to ${names[first + count - 1]}`;
  }

  /**
   * Return the value of a cell as its colour shows it.
   * @param {number} row
   * @param {number} column
   */
  levelWord(row, column) {
    const header = /** @type {Header} */ (this.header);
    const code = this.cells[row * header.steps.length + column];
    const [low, high] = header.scale;
    const level = low + (code / LEVELS) * (high - low);
    return code === ABSENT ? "absent" : code === NAN ? "NaN" : code === INFINITE ? "Inf" : `${Number(level.toPrecision(3))}×`;
  }

  /**
   * Show the exact value of a cell, and the tensor that has it.
   * @param {number} row
   * @param {number} column
   */
  async exact(row, column) {
    const { rows, names } = /** @type {Header} */ (this.header);
    const [first, count] = rows[row];
    // Of very many tensors, only the holder of the extreme of the row is asked for.
    const tensors = count > 64 ? [this.holder(row)] : names.slice(first, first + count);
    const query = new URLSearchParams(location.search);
    for (const [name, value] of [...this.choices(), ["tensors", JSON.stringify(tensors)], ["column", String(column)]]) query.set(name, value);
    const found = await (await fetch(`${base}/data/cell?${query}`)).json();
    if (this.cursor[0] !== row || this.cursor[1] !== column) return;
    const header = /** @type {Header} */ (this.header);
    if (!found) return readout([["", count === 1 ? this.holder(row) : this.pooled(row)], ["step", stepWord(header, column)], ["", "absent"]]);
    const word = found.nans ? `NaN in ${found.nans} elements` : found.infs ? `Inf in ${found.infs} elements` : shown(found.value);
    const more = count > 1 ? [[`largest of ${count} tensors,`, `${names[first]} to ${names[first + count - 1]}`]] : [];
    readout([["", found.tensor], ["step", found.step.toLocaleString("en")], ["attempt", String(found.attempt)], [this.box.dataset.op ?? "", word], ...(found.rank === null ? [] : [["rank", String(found.rank)]]), ...more]);
  }

  /** @param {PointerEvent} event */
  released(event) {
    const [row, column] = this.cell(event);
    const from = this.drag;
    this.drag = -1;
    if (row < 0 || this.isRanks) return;
    if (from >= 0 && Math.abs(column - from) > 3) this.zoom({ columns: this.span(from, column) });
    else this.open(row);
  }

  /**
   * Return a range of sampled steps for the address.
   * @param {number} a
   * @param {number} b
   */
  span(a, b) {
    const known = new URLSearchParams(location.search).get("columns")?.split("-").map(Number) ?? [0, this.header?.columns ?? 0];
    const scale = (known[1] - known[0]) / (this.header?.steps.length ?? 1);
    const [low, high] = [Math.min(a, b), Math.max(a, b) + 1];
    return `${Math.floor(known[0] + low * scale)}-${Math.ceil(known[0] + high * scale)}`;
  }

  /**
   * Open the tensor of a row, or zoom to the tensors that the row combines.
   * @param {number} row
   */
  open(row) {
    const { rows, names, base: before } = /** @type {Header} */ (this.header);
    const [first, count] = rows[row];
    if (count === 1) return this.zoom({ tensor: this.holder(row) });
    // An eighth of the tensors around the row, until each row is one tensor.
    const half = Math.max(count, Math.min(Math.ceil(names.length / 16), Math.floor(this.area()[3] / 2)));
    const from = Math.max(0, before + first + (count >> 1) - half);
    this.zoom({ rows: `${from}-${from + 2 * half}` });
  }

  /** @param {Record<string, string>} changes */
  zoom(changes) {
    const url = new URL(location.href);
    for (const [name, value] of Object.entries(changes)) url.searchParams.set(name, value);
    location.href = url.href;
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const header = this.header;
    const moves = /** @type {Record<string, [number, number]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] });
    if (!header) return;
    const [row, column] = this.cursor[0] < 0 ? (header.firstBad ?? [0, 0]) : this.cursor;
    const move = moves[event.key];
    if (move) {
      const step = event.shiftKey ? 10 : 1;
      this.moved(clamp(row + move[0] * step, header.rows.length), clamp(column + move[1] * step, header.steps.length));
      event.preventDefault();
    } else if (event.key === "Enter" && !this.isRanks) this.open(row);
  }
}

/**
 * @param {number} value
 * @param {number} length
 */
function clamp(value, length) {
  return Math.min(Math.max(value, 0), length - 1);
}

/** Return whether colours show values instead of their ratio to the median of the tensor. */
function isAbsolute() {
  return Boolean(new URLSearchParams(location.search).get("absolute"));
}

/**
 * Return the colour of a code as four bytes.
 * @param {number} code
 */
function packed(code) {
  const [red, green, blue] = code <= LEVELS ? viridis(code / LEVELS) : code === INFINITE ? [255, 138, 196] : [229, 48, 138];
  return code === ABSENT ? 0 : ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * Return the step of a column, or its range of steps.
 * @param {Header} header
 * @param {number} column
 */
function stepWord(header, column) {
  const [first, last] = [header.steps[column], header.lastSteps[column]];
  return first === last ? first.toLocaleString("en") : `${first.toLocaleString("en")}–${last.toLocaleString("en")}`;
}

/**
 * Return the end of a word that fits into a width.
 * @param {CanvasRenderingContext2D} context
 * @param {string} word
 * @param {number} width
 */
function clipped(context, word, width) {
  if (context.measureText(word).width <= width) return word;
  let end = word.slice(-Math.floor(width / 6));
  while (end.length > 4 && context.measureText(`…${end}`).width > width) end = end.slice(1);
  return `…${end}`;
}

/** @param {string[][]} facts */
function readout(facts) {
  const box = document.getElementById("readout");
  box?.replaceChildren(
    ...facts.map(([name, value]) => {
      const part = document.createElement("span");
      const word = document.createElement("b");
      word.textContent = value;
      part.append(name, word);
      return part;
    }),
  );
}

/**
 * Show all heat maps of the page.
 * @param {(key: string, word: string, action: () => void) => void} bind
 * @param {(() => Promise<void>)[]} updates
 * @param {(() => void)[]} redraws
 */
export function start(bind, updates, redraws) {
  const maps = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".heat")]).map((box) => new HeatMap(box));
  const load = async () => void (await Promise.all(maps.map((map) => map.load())));
  void load();
  updates.push(load);
  redraws.push(() => maps.forEach((map) => map.draw()));
  const bar = /** @type {HTMLFormElement | null} */ (document.getElementById("heatbar"));
  bar?.addEventListener("change", () => bar.submit());
  if (bar) {
    bind("/", "search tensors", () => document.getElementById("search")?.focus());
    bind("0", "whole map", () => document.getElementById("whole")?.click());
  }
}
