// Heat maps on a canvas: all tensors over the steps of a run, or the step times of all ranks.
import { colour, hatch, MAP_LEFT } from "./marks.js";
import { poolColumns } from "./cells.js";
import { bad, isAbsolute, labels, legend, lines, marks } from "./heat_marks.js";
import { shown, viridis } from "./logic.js";

/** @typedef {import("./heat_marks.js").Header} Header */

const base = document.body.dataset.base ?? "";
const [ABSENT, INFINITE, NAN, LEVELS] = [253, 254, 255, 250];
const RIGHT = 74;
const BOTTOM = 22;

class HeatMap {
  /** @param {HTMLElement} box */
  constructor(box) {
    this.box = box;
    this.isRanks = box.dataset.source === "ranks";
    this.isBins = box.dataset.source === "histogram";
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
    const own = ["run", "kind", "op", "rank", "whole", "tensor"].map((name) => /** @type {[string, string]} */ ([name, this.box.dataset[name] ?? ""]));
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
    if (this.isRanks && this.header) this.box.style.height = `${Math.max(90, Math.min(480, this.header.rows.length * 14 + BOTTOM + 8))}px`;
    const notice = document.getElementById("gridnotice");
    if (notice && this.header && this.box.id === "heat" && !this.isRanks) notice.textContent = this.header.notice;
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
    const middle = isAbsolute() || this.isBins ? 0 : (-header.scale[0] / (header.scale[1] - header.scale[0])) * LEVELS;
    const cells = poolColumns(this.cells, header.rows.length, columns, middle);
    for (let at = 0; at < cells.length; at += 1) words[at] = colours[cells[at]];
    context.putImageData(pixels, 0, 0);
    this.image = image;
  }

  /** @returns {[number, number, number, number]} */
  area() {
    const left = this.isRanks ? 96 : MAP_LEFT;
    return [left, 4, Math.max(20, this.box.clientWidth - 24 - left - RIGHT), Math.max(20, this.box.clientHeight - BOTTOM - 8)];
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
      context.fillText(header ? header.notice : this.isLate ? "Loading …" : "", this.area()[0], 40);
      return;
    }
    context.fillStyle = hatch(context, "absent", "sunken");
    context.fillRect(left, top, wide, high);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, left, top, wide, high);
    bad(context, this);
    if (this.isRanks) lines(context, this);
    labels(context, this);
    legend(context, this);
    marks(context, this);
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
    const facts = [["", this.isRanks || this.isBins || header.rows[row][1] === 1 ? this.holder(row) : this.pooled(row)], ["step", stepWord(header, column)], ["attempt", String(header.attempts[column])]];
    const show = (/** @type {string[][]} */ listed) => readout(listed, this.box);
    if (this.isRanks) show([...facts, ["against the median", this.levelWord(row, column)]]);
    else if (this.isBins) show([...facts, ["share of elements", this.levelWord(row, column)]]);
    else {
      show(facts);
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
    if (this.isBins && code <= LEVELS) return code ? `about ${Number((100 * 10 ** level).toPrecision(2))} %` : `at most ${Number((100 * 10 ** low).toPrecision(3))} %`;
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
    if (!found) return readout([["", count === 1 ? this.holder(row) : this.pooled(row)], ["step", stepWord(header, column)], ["", "absent"]], this.box);
    const word = found.nans ? `NaN in ${found.nans} elements` : found.infs ? `Inf in ${found.infs} elements` : shown(found.value);
    const more = count > 1 ? [[`largest of ${count} tensors,`, `${names[first]} to ${names[first + count - 1]}`]] : [];
    readout([["", found.tensor], ["step", found.step.toLocaleString("en")], ["attempt", String(found.attempt)], [this.box.dataset.op ?? "", word], ...(found.rank === null ? [] : [["rank", String(found.rank)]]), ...more], this.box);
  }

  /** @param {PointerEvent} event */
  released(event) {
    const [row, column] = this.cell(event);
    const from = this.drag;
    this.drag = -1;
    if (row < 0 || this.isRanks || this.isBins) return;
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
    } else if (event.key === "Enter" && !this.isRanks && !this.isBins) this.open(row);
  }
}

/**
 * @param {number} value
 * @param {number} length
 */
function clamp(value, length) {
  return Math.min(Math.max(value, 0), length - 1);
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
 * @param {string[][]} facts
 * @param {HTMLElement} map
 */
function readout(facts, map) {
  const box = map.parentElement?.querySelector(".readout") ?? document.getElementById("readout");
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
  const chosen = /** @type {HTMLFormElement | null} */ (document.querySelector("form.chosen"));
  chosen?.addEventListener("change", () => chosen.submit());
  if (bar) {
    bind("/", "search tensors", () => document.getElementById("search")?.focus());
    bind("0", "whole map", () => document.getElementById("whole")?.click());
  }
}
