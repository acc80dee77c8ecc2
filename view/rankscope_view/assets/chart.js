// One chart of a curve: lines by uPlot; NaN ranges, restarts and markers are drawn over them.
import { nearest, placeLabel, shown, stepSplits, tickLabel, valueRange } from "./logic.js";

/** @typedef {import("./logic.js").Curve} Curve */
/** @typedef {{name: string, log: boolean, fixed: boolean, zero: boolean, tensor?: boolean, compare?: boolean}} Options */

const COLOURS = ["s1", "s2", "s3", "s4", "s5", "s6"];
const LANE = 30;

/**
 * Return a colour of the style sheet as the canvas needs it.
 * @param {string} name
 * @returns {string}
 */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/**
 * Return a pattern of diagonal stripes.
 * @param {CanvasRenderingContext2D} context
 * @param {string} front
 * @param {string} back
 * @returns {CanvasPattern | string}
 */
export function hatch(context, front, back) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const inner = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
  if (back) {
    inner.fillStyle = back;
    inner.fillRect(0, 0, 8, 8);
  }
  inner.strokeStyle = front;
  inner.lineWidth = 2;
  for (const at of [-8, 0, 8]) {
    inner.moveTo(at - 1, 9);
    inner.lineTo(at + 9, -1);
  }
  inner.stroke();
  return context.createPattern(tile, "repeat") ?? front;
}

export class Chart {
  /**
   * @param {HTMLElement} box
   * @param {Options} options
   * @param {(from: number, to: number) => void} onZoom
   * @param {() => void} onWhole
   */
  constructor(box, options, onZoom, onWhole) {
    this.box = box;
    this.options = options;
    this.onZoom = onZoom;
    this.onWhole = onWhole;
    this.legend = /** @type {HTMLElement | null} */ (box.parentElement?.querySelector(".legend") ?? null);
    /** @type {Curve | null} */ this.curve = null;
    /** @type {any} */ this.plot = null;
    this.shape = "";
    box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(box);
  }

  /** Return whether the chart is below a heat map, with which it shares its horizontal axis. */
  isBelowMap() {
    return Boolean(this.options.tensor && document.getElementById("heat"));
  }

  size() {
    return { width: Math.max(120, this.box.clientWidth - 12), height: this.box.clientHeight };
  }

  /**
   * Draw `curve`. The plot is kept if only its data changed.
   * @param {Curve} curve
   * @param {import("./logic.js").State} state
   */
  show(curve, state) {
    this.curve = curve;
    const log = state.log || this.options.log;
    this.range = valueRange(curve, { log, fit: state.fit || this.options.fixed, zero: this.options.zero });
    const [low, high] = curve.extent ?? [0, 1];
    const margin = high > low ? 0 : Math.abs(low) * 0.5 || 1;
    this.window = [state.from ?? low - margin, state.to ?? high + margin];
    const shape = [log, curve.axis, curve.lines.length, state.smooth, document.documentElement.dataset.theme].join();
    if (this.plot && this.shape === shape) {
      this.plot.setData(this.data(curve), false);
      this.plot.batch(() => {
        this.plot.setScale("x", { min: this.window?.[0], max: this.window?.[1] });
        this.plot.setScale("y", { min: this.range?.[0], max: this.range?.[1] });
      });
    } else {
      this.shape = shape;
      this.plot?.destroy();
      this.box.replaceChildren();
      this.plot = new uPlot(this.settings(curve, log), this.data(curve), this.box);
    }
    this.values(null);
  }

  /** @param {Curve} curve */
  data(curve) {
    if (curve.lines.length === 1) {
      const [line] = curve.lines;
      return [line.x, line.low, line.high, line.value, line.smoothed];
    }
    if (!curve.lines.length) return [[], [], [], [], []];
    const [x, ...rest] = uPlot.join(curve.lines.map((line) => [line.x, line.value, line.smoothed]));
    return [x, ...rest];
  }

  /**
   * @param {Curve} curve
   * @param {boolean} log
   */
  settings(curve, log) {
    const [text, grid] = [colour("text-3"), colour("grid")];
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const points = { show: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ first, /** @type {number} */ last) => last - first < 3 };
    const pair = (/** @type {string} */ main, /** @type {string} */ raw) => [
      { stroke: raw, width: 1, points, spanGaps: false },
      { stroke: main, width: 1.8, points: { show: false }, spanGaps: false },
    ];
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    const isSole = curve.lines.length <= 1;
    const smooth = curve.lines.some((line) => line.smoothed.some((one) => one !== null));
    const series = isSole
      ? [{}, edge, edge, ...pair(colour("s1"), colour(smooth ? "raw" : "s1"))]
      : [{}, ...curve.lines.flatMap((_, at) => pair(colour(COLOURS[at % 6]), smooth ? faded(COLOURS[at % 6]) : colour(COLOURS[at % 6])))];
    const axis = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const lane = this.options.name === "loss" && !this.options.compare ? LANE : 8;
    return {
      ...this.size(),
      padding: [lane, this.isBelowMap() ? 80 : 8, 0, 0],
      series,
      bands: isSole ? [{ series: [2, 1], fill: colour("band") }] : [],
      scales: {
        x: { time: false, range: () => this.window },
        y: { distr: log ? 3 : 1, range: () => this.range },
      },
      axes: [
        { ...axis, space: 70, size: 26, splits: curve.axis === "arrival" ? () => stepSplits(this.curve, this.window ?? [0, 1], this.box.clientWidth / 90) : undefined, values: (/** @type {any} */ u, /** @type {number[]} */ ticks) => this.places(u, ticks) },
        { ...axis, size: this.isBelowMap() ? 102 : 52, values: (/** @type {any} */ _, /** @type {(number | null)[]} */ ticks) => ticks.map((one) => (one === null || (log && !isLabelled(one, this.range ?? [1, 10])) ? "" : tickLabel(one))) },
      ],
      cursor: {
        sync: { key: "run" },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: { dblclick: () => () => (this.onWhole(), null) },
      },
      hooks: {
        drawClear: [(/** @type {any} */ u) => this.under(u)],
        draw: [(/** @type {any} */ u) => this.over(u)],
        setCursor: [(/** @type {any} */ u) => this.values(u.cursor.idx)],
        setSelect: [(/** @type {any} */ u) => this.selected(u)],
      },
    };
  }

  /**
   * @param {any} u
   * @param {number[]} ticks
   */
  places(u, ticks) {
    const span = u.scales.x.max - u.scales.x.min;
    return ticks.map((one) => (this.curve && (this.curve.axis === "time" || Number.isInteger(one)) ? placeLabel(this.curve, one, span) : ""));
  }

  /** @param {any} u */
  selected(u) {
    if (u.select.width < 4) return;
    const [from, to] = [u.select.left, u.select.left + u.select.width].map((at) => u.posToVal(at, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom(from, to);
  }

  /**
   * Draw what is below the lines: ranges without finite values.
   * @param {any} u
   */
  under(u) {
    const context = u.ctx;
    context.save();
    clip(context, u.bbox);
    for (const [first, last, word] of this.curve?.nonfinite ?? []) {
      const [left, right] = [first, last].map((at) => u.valToPos(at, "x", true));
      context.fillStyle = hatch(context, colour("nan"), word.startsWith("Inf") ? colour("inf") : "");
      context.globalAlpha = 0.75;
      context.fillRect(left - 1, u.bbox.top, Math.max(3, right - left + 2), u.bbox.height);
      context.globalAlpha = 1;
    }
    context.restore();
  }

  /**
   * Draw what is above the lines: restarts, incidents, markers, labels, and marks of values outside of the range.
   * @param {any} u
   */
  over(u) {
    const context = u.ctx;
    const ratio = devicePixelRatio;
    const curve = this.curve;
    if (!curve) return;
    context.save();
    const visible = (/** @type {number} */ x) => x >= u.scales.x.min && x <= u.scales.x.max;
    for (const at of curve.restarts.filter(visible)) line(context, u, at, colour("stopping"), [4 * ratio, 3 * ratio], 1);
    for (const [group, x, , , isCritical] of curve.markers ?? []) {
      if (!visible(x)) continue;
      if (group === "incident" && isCritical) line(context, u, x, colour("failed"), [], 0.3);
      if (this.options.name === "loss" && !this.options.compare) glyph(context, group, u.valToPos(x, "x", true), u.bbox.top, ratio);
    }
    this.edges(u);
    context.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
    for (const [first, last, word] of curve.nonfinite.slice(0, 12)) {
      if (!visible(first) && !visible(last)) continue;
      const right = u.valToPos(last, "x", true) + 5 * ratio;
      const width = context.measureText(word).width;
      const isInside = right + width < u.bbox.left + u.bbox.width;
      context.fillStyle = colour("failed");
      context.textAlign = isInside ? "left" : "right";
      context.fillText(word, isInside ? right : u.valToPos(first, "x", true) - 5 * ratio, u.bbox.top + 16 * ratio);
    }
    context.restore();
  }

  /**
   * Mark values outside of the range with triangles at the edge.
   * @param {any} u
   */
  edges(u) {
    const context = u.ctx;
    const { min, max } = u.scales.y;
    const ratio = devicePixelRatio;
    context.fillStyle = colour("text-3");
    let last = -99;
    for (const one of this.curve?.lines ?? []) {
      one.value.forEach((value, at) => {
        if (value === null || (value <= max && value >= min)) return;
        const x = u.valToPos(one.x[at], "x", true);
        if (x - last < 5 * ratio || x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
        last = x;
        const isAbove = value > max;
        const y = isAbove ? u.bbox.top + 1 : u.bbox.top + u.bbox.height - 1;
        triangle(context, x, y, 3 * ratio, isAbove ? 5 * ratio : -5 * ratio);
      });
    }
  }

  /**
   * Show the values at the cursor, or the newest ones.
   * @param {number | null | undefined} index
   */
  values(index) {
    const curve = this.curve;
    if (!this.legend || !curve) return;
    const data = this.plot?.data ?? [[]];
    const at = index ?? data[0].length - 1;
    /** @type {[string, string, number | null | undefined][]} */
    const found = [];
    if (curve.lines.length <= 1) {
      const smooth = data[4]?.some((/** @type {number | null} */ one) => one !== null);
      if (curve.lines[0]?.high.some((one, row) => one !== null && one !== curve.lines[0].low[row])) found.push(["band", curve.buckets ? "lowest–highest" : "range of ranks", undefined]);
      found.push([smooth ? "raw" : "s1", smooth ? "raw" : "value", data[3]?.[at]]);
      if (smooth) found.push(["s1", "smoothed", data[4]?.[at]]);
    } else {
      curve.lines.forEach((one, row) => found.push([COLOURS[row % 6], one.label ?? "", one.value[nearest(one.x, data[0][at])]]));
    }
    const isBad = index !== null && index !== undefined && curve.nonfinite.some(([first, last]) => data[0][at] >= first && data[0][at] <= last);
    const parts = found.slice(0, 6).map(([name, word, value]) => {
      const part = document.createElement("span");
      const mark = document.createElement("i");
      mark.style.background = `var(--${name})`;
      part.append(mark, word);
      if (value !== undefined) {
        const text = document.createElement("b");
        text.textContent = value === null && isBad ? "NaN" : shown(value);
        part.append(text);
      }
      return part;
    });
    if (index !== null && index !== undefined) {
      const place = document.createElement("span");
      place.textContent = placeLabel(curve, data[0][at], 0);
      parts.unshift(place);
    }
    this.legend.replaceChildren(...parts);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const u = this.plot;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? 10 : 1;
    const index = u.cursor.idx ?? u.data[0].length - 1;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = Math.min(Math.max(index + (event.key === "ArrowLeft" ? -step : step), 0), u.data[0].length - 1);
      u.setCursor({ left: u.valToPos(u.data[0][next], "x"), top: u.bbox.height / 2 });
      event.preventDefault();
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = u.scales.x;
      const centre = u.data[0][index] ?? (min + max) / 2;
      const factor = event.key === "+" ? 0.5 : 2;
      this.onZoom(centre - (centre - min) * factor, centre + (max - centre) * factor);
    }
  }

  /** Save the chart as a picture. */
  picture() {
    this.plot?.ctx.canvas.toBlob((/** @type {Blob} */ blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = `${this.options.name}.png`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
}

/**
 * Return whether a tick of a logarithmic axis has a label: decades, and within two decades also 2 and 5.
 * @param {number} value
 * @param {number[]} range
 */
function isLabelled(value, range) {
  const power = Math.log10(value);
  const mantissa = value / 10 ** Math.floor(power + 1e-9);
  const isFine = range[1] / range[0] < 100;
  return [1, ...(isFine ? [2, 5] : [])].some((one) => Math.abs(mantissa - one) < 1e-6);
}

/**
 * Return a colour with a third of its weight.
 * @param {string} name
 */
function faded(name) {
  return colour(name).replace(/^rgb\((.*)\)$/, "rgba($1, 0.4)");
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {{left: number, top: number, width: number, height: number}} box
 */
function clip(context, box) {
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {any} u
 * @param {number} at
 * @param {string} stroke
 * @param {number[]} dash
 * @param {number} alpha
 */
function line(context, u, at, stroke, dash, alpha) {
  const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
  context.globalAlpha = alpha;
  context.strokeStyle = stroke;
  context.lineWidth = devicePixelRatio;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x, u.bbox.top);
  context.lineTo(x, u.bbox.top + u.bbox.height);
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} half
 * @param {number} height
 */
function triangle(context, x, y, half, height) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - half, y + height);
  context.lineTo(x + half, y + height);
  context.fill();
}

/**
 * Draw the mark of an event in the lane above a chart: incidents and restarts in the upper row.
 * @param {CanvasRenderingContext2D} context
 * @param {string} group
 * @param {number} x
 * @param {number} top
 * @param {number} ratio
 */
function glyph(context, group, x, top, ratio) {
  const y = top - (group === "incident" || group === "restart" ? 22 : 8) * ratio;
  const size = 4 * ratio;
  context.lineWidth = 2 * ratio;
  context.beginPath();
  if (group === "incident") {
    context.strokeStyle = colour("failed");
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size);
    context.lineTo(x - size, y + size);
    context.stroke();
  } else if (group === "restart") {
    context.fillStyle = colour("stopping");
    triangle(context, x, y + size, size, -2 * size);
  } else if (group === "checkpoint") {
    context.fillStyle = colour("completed");
    context.moveTo(x, y - size);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.lineTo(x - size, y);
    context.fill();
  } else {
    context.strokeStyle = colour("waiting");
    context.arc(x, y, size * 1.3, 0, 7);
    context.stroke();
  }
}
