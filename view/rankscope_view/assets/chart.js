// One chart of a curve: lines by uPlot; NaN ranges, restarts and markers are drawn over them.
import { byteSize, logTicks, perplexityRange, placeLabel, stepSplits, tickLabel, valueRange } from "./logic.js";
import { clip, colour, cross, glyph, hatch, labelFont, lineAcross, MAP_LEFT, ring, triangle } from "./marks.js";
import { setText } from "./newest.js";
import { alone, bandsOf, isDrawn, seriesOf, valueText } from "./series.js";

/** @typedef {import("./logic.js").Curve} Curve */
/** @typedef {import("./series.js").Series} Series */
/** @typedef {{name: string, log: boolean, fixed: boolean, zero: boolean, tensor?: boolean, compare?: boolean,
 *   keys?: string[]}} Options keys: of a metric, the names under which new rows have its lines */

const LANE = 42;
/** Height of the labels of ranges without finite values above a chart. */
const WORDS = 12;
/** Distances of ticks of an axis of bytes. */
const BINARY = [...Array(50).keys()].map((power) => 2 ** power);
/** @type {Record<string, {width: number, dash?: number[]}>} Width and dashes by style. */
const STYLES = { edge: { width: 0 }, behind: { width: 1 }, raw: { width: 1.5 }, main: { width: 1.5 }, other: { width: 1 }, baseline: { width: 1.5, dash: [8, 4] }, limit: { width: 1.2, dash: [2, 3] } };

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
    /** @type {Series[]} */ this.series = [];
    /** @type {any} */ this.plot = null;
    this.shape = "";
    this.entriesKey = "";
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
    this.series = seriesOf(curve);
    this.bounded = this.options.name === "perplexity" ? perplexityRange(curve) : null;
    const log = state.log || this.options.log || this.bounded !== null;
    this.range = this.bounded ?? valueRange(curve, { log, cut: state.cut && !this.options.fixed, zero: this.options.zero });
    const [low, high] = curve.extent ?? [0, 1];
    const margin = high > low ? 0 : Math.abs(low) * 0.5 || 1;
    this.window = [state.from ?? low - margin, state.to ?? high + margin];
    const shape = [log, curve.axis, ...this.series.map((one) => one.style + one.colour), document.documentElement.dataset.theme].join();
    if (this.plot && this.shape === shape) {
      this.plot.batch(() => {
        this.plot.setData(this.data(), false);
        this.plot.setScale("x", { min: this.window?.[0], max: this.window?.[1] });
        this.plot.setScale("y", { min: this.range?.[0], max: this.range?.[1] });
      });
    } else {
      this.shape = shape;
      this.plot?.destroy();
      this.box.replaceChildren();
      this.plot = new uPlot(this.settings(log), this.data(), this.box);
    }
    this.values(null);
  }

  /** Return one array of places and one of values for each series. */
  data() {
    const series = this.series;
    if (series.every((one) => one.x === series[0].x)) return [series[0].x, ...series.map((one) => one.y)];
    return uPlot.join(series.map((one) => [one.x, one.y]), series.map(() => [2, 2])); // 2: an absent value extends to places of other series
  }

  /** @param {boolean} log */
  settings(log) {
    const [text, grid] = [colour("text-3"), colour("grid")];
    const font = labelFont().replace(/^\S+/, "11px");
    const points = { show: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ first, /** @type {number} */ last) => last - first < 3, filter: (/** @type {any} */ u, /** @type {number} */ at, /** @type {boolean} */ show) => (show ? null : alone(u.data[at])) };
    const series = this.series.map(({ style, colour: name }) => ({
      ...STYLES[style],
      stroke: style === "edge" ? "transparent" : colour(style === "other" ? `${name}-faded` : name),
      points: this.options.name === "eval_loss" ? { show: style === "raw", size: 6 } : style === "raw" ? points : { show: false },
      spanGaps: false,
    }));
    const isBytes = this.options.name.endsWith("_bytes");
    const axis = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const curve = /** @type {Curve} */ (this.curve);
    return {
      ...this.size(),
      padding: [() => this.lane() + (this.curve?.nonfinite.length ? WORDS : 0), () => (this.isBelowMap() ? 80 : Math.max(18, 4 + 3.3 * this.longestPlace())), 0, 0], // the last label is as wide as half of it
      series: [{}, ...series],
      bands: bandsOf(this.series).map(([upper, lower, name]) => ({ series: [upper + 1, lower + 1], fill: colour(name) })),
      scales: {
        x: { time: false, range: () => this.window },
        y: { distr: log ? 3 : 1, range: () => this.range },
      },
      axes: [
        { ...axis, space: 70, size: 26, splits: curve.axis === "arrival" ? () => stepSplits(this.curve, this.window ?? [0, 1], this.box.clientWidth / 75) : undefined, values: (/** @type {any} */ u, /** @type {number[]} */ ticks) => this.places(u, ticks) },
        { ...axis, ...(isBytes ? { incrs: BINARY } : {}), ...(log ? { splits: () => logTicks(this.range ?? [1, 10]), filter: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks } : {}), size: (/** @type {any} */ _, /** @type {string[] | null} */ words) => (this.isBelowMap() ? MAP_LEFT + 6 : Math.max(52, 16 + 6.3 * Math.max(0, ...(words ?? []).map((one) => one.length)))), values: (/** @type {any} */ _, /** @type {(number | null)[]} */ ticks) => ticks.map((one) => (one === null ? "" : isBytes ? byteSize(one) : tickLabel(one))) },
      ],
      cursor: {
        sync: { key: "run" },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: {
          dblclick: () => () => (this.onWhole(), null),
          mousedown: (/** @type {any} */ u, /** @type {any} */ _, /** @type {(event: MouseEvent) => void} */ select) => (/** @type {MouseEvent} */ event) => (event.shiftKey ? this.pan(u, event) : select(event), null),
        },
      },
      hooks: {
        drawAxes: [(/** @type {any} */ u) => this.under(u)],
        draw: [(/** @type {any} */ u) => this.over(u)],
        setCursor: [(/** @type {any} */ u) => this.values(u.cursor.idx)],
        setSelect: [(/** @type {any} */ u) => this.selected(u)],
      },
    };
  }

  /** Return the height of the lane for the marks of events above the chart. */
  lane() {
    return this.options.name === "loss" ? LANE : 8;
  }

  /** Return the number of characters of the label at the right end of the axis. */
  longestPlace() {
    const [first, last] = this.window ?? [0, 1];
    return this.curve ? placeLabel(this.curve, last, last - first).length : 0;
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
   * Move the window with the pointer until its button is released; then the server is asked for the new window.
   * @param {any} u
   * @param {MouseEvent} event
   */
  pan(u, event) {
    const { min, max } = u.scales.x;
    const perPixel = (max - min) / (u.bbox.width / devicePixelRatio);
    const moved = (/** @type {MouseEvent} */ now) => (event.clientX - now.clientX) * perPixel;
    const follow = (/** @type {MouseEvent} */ now) => {
      this.window = [min + moved(now), max + moved(now)];
      u.setScale("x", { min: this.window[0], max: this.window[1] });
    };
    const end = (/** @type {MouseEvent} */ now) => {
      removeEventListener("mousemove", follow);
      removeEventListener("mouseup", end);
      if (moved(now)) this.onZoom(min + moved(now), max + moved(now));
    };
    addEventListener("mousemove", follow);
    addEventListener("mouseup", end);
  }

  /**
   * Draw what is below the lines and above the grid: ranges without finite values, and the zero of a difference.
   * @param {any} u
   */
  under(u) {
    const context = u.ctx;
    context.save();
    clip(context, u.bbox);
    if (this.options.compare && this.options.zero) {
      context.fillStyle = colour("text-3");
      context.fillRect(u.bbox.left, Math.round(u.valToPos(0, "y", true)), u.bbox.width, devicePixelRatio);
    }
    for (const [first, last, word] of this.curve?.nonfinite ?? []) {
      const [left, right] = [first, last].map((at) => u.valToPos(at, "x", true));
      context.fillStyle = hatch(context, "nan", word.startsWith("Inf") ? "inf" : "");
      context.globalAlpha = 0.6;
      const tall = this.curve?.lines.some((line) => line.label && !line.role) ? 8 * devicePixelRatio : u.bbox.height; // the lines of other runs are not covered
      context.fillRect(left - 1, u.bbox.top, Math.max(3, right - left + 2), tall);
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
    const curve = this.curve;
    if (!curve) return;
    context.save();
    const visible = (/** @type {number} */ x) => x >= u.scales.x.min && x <= u.scales.x.max;
    for (const at of curve.restarts.filter(visible)) lineAcross(u, at, "stopping", [4, 3], 1);
    for (const [group, x, , , isCritical] of curve.markers ?? []) {
      if (!visible(x)) continue;
      if (group === "incident" && isCritical) lineAcross(u, x, "failed", [], 0.3);
      if (this.options.name === "loss") glyph(context, group, u.valToPos(x, "x", true), u.bbox.top);
    }
    this.edges(u);
    context.setLineDash([]); // that of the last line remains
    for (const [x, value] of (curve.firings ?? []).filter(([place]) => visible(place))) {
      if (value === null) cross(context, u.valToPos(x, "x", true), u.bbox.top + 8 * devicePixelRatio, 4 * devicePixelRatio);
      else if (value >= u.scales.y.min && value <= u.scales.y.max) ring(context, u.valToPos(x, "x", true), u.valToPos(value, "y", true));
    }
    this.words(u, visible);
    context.restore();
  }

  /**
   * Write the label of each range without finite values above it, where no curve is, and from which value on an axis is cut.
   * @param {any} u
   * @param {(x: number) => boolean} visible
   */
  words(u, visible) {
    const context = u.ctx;
    const ratio = devicePixelRatio;
    context.font = labelFont();
    context.textAlign = "left";
    context.fillStyle = colour("text-2");
    if (this.bounded) context.fillText(`▲ above ${tickLabel(Number(this.bounded[1].toPrecision(2)))}`, u.bbox.left + 5 * ratio, u.bbox.top + 16 * ratio);
    context.fillStyle = colour("failed");
    context.textAlign = "center";
    let end = -Infinity; // a label that would cover the one before is left out
    for (const [first, last, word] of this.curve?.nonfinite.slice(0, 12) ?? []) {
      if (!visible(first) && !visible(last)) continue;
      const half = context.measureText(word).width / 2;
      const middle = (u.valToPos(Math.max(first, u.scales.x.min), "x", true) + u.valToPos(Math.min(last, u.scales.x.max), "x", true)) / 2;
      const at = Math.max(u.bbox.left + half, Math.min(middle, u.bbox.left + u.bbox.width - half));
      if (at - half < end) continue;
      context.fillText(word, at, u.bbox.top - (this.lane() + 1) * ratio);
      end = at + half + 4 * ratio;
    }
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
    for (const { x: places, y: values, style } of this.series) {
      if (style !== "raw") continue;
      for (let at = 0; at < values.length; at += 1) {
        const value = values[at];
        if (value === null || (value <= max && value >= min)) continue;
        const x = u.valToPos(places[at], "x", true);
        if (x - last < 5 * ratio || x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        last = x;
        const y = value > max ? u.bbox.top + 1 : u.bbox.top + u.bbox.height - 1;
        triangle(context, x, y, 3 * ratio, value > max ? 5 * ratio : -5 * ratio);
      }
    }
  }

  /**
   * Show the values at the cursor, or the newest ones.
   * @param {number | null | undefined} index
   */
  values(index) {
    const curve = this.curve;
    if (!this.legend || !curve) return;
    const places = this.plot?.data[0] ?? [];
    const isPointed = index !== null && index !== undefined;
    const main = this.options.tensor ? this.series.find((one) => one.style === "main") : undefined;
    const newest = main?.x[main.y.findLastIndex((one) => one !== null)] ?? places[places.length - 1];
    const x = isPointed ? places[index] : newest;
    const entries = this.entries();
    const texts = entries.map(([, style, , series]) => (series && style !== "limit" && style !== "baseline" ? valueText(curve, series, x, isPointed) : null));
    const hasPlace = isPointed || Boolean(this.options.tensor);
    const key = JSON.stringify([hasPlace, entries.map(([mark, style, word], at) => [mark, style, word, texts[at] === null])]);
    if (key !== this.entriesKey) {
      this.entriesKey = key;
      const parts = entries.map(([mark, style, word], at) => entry(mark, style, word, texts[at]));
      this.legend.replaceChildren(...(hasPlace ? [document.createElement("span")] : []), ...parts);
    }
    if (hasPlace) setText(this.legend.firstElementChild, curve.axis === "time" ? placeLabel(curve, x, 0) : `step ${placeLabel(curve, x, 0)}`);
    const values = this.legend.querySelectorAll("b");
    texts.filter((text) => text !== null).forEach((text, at) => setText(values[at], text ?? ""));
  }

  /**
   * Return the entries of the legend: colour, style, word, and the series with the value.
   * @returns {[string, string, string, Series | null][]}
   */
  entries() {
    const curve = /** @type {Curve} */ (this.curve);
    const drawn = this.series.filter((one) => one.style !== "edge" && isDrawn(one));
    const others = drawn.filter((one) => one.style === "other");
    /** @type {[string, string, string, Series | null][]} */ const found = [];
    if (!others.length && this.series.some((one) => one.style === "edge")) found.push(["band", "wide", curve.buckets ? "lowest–highest" : "min–max of ranks", null]);
    const several = curve.lines.some((line) => line.label && !line.role);
    const smooth = drawn.some((one) => one.style === "main");
    for (const one of drawn.filter(({ style }) => style !== "other")) {
      if (several && smooth && one.style === "main") continue; // the strong line has the label
      const word = several || curve.lines[0]?.role ? one.label : one.style === "main" ? "smoothed" : smooth ? "raw" : "value";
      found.push([one.colour, one.style, word, one]);
    }
    if (others.length) found.splice(1, 0, ["s6", "", `${others.length} other rank${others.length > 1 ? "s" : ""}`, null]);
    if (drawn.some((one) => one.style === "limit")) found.push(["allowed", "wide", "allowed", null]);
    const fired = (curve.firings ?? []).map(([, value]) => value !== null);
    if (fired.includes(true)) found.push(["failed", "disc", "fired", null]);
    if (fired.includes(false)) found.push(["failed", "cross", "fired, not on the curve", null]);
    return found.slice(0, 9);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const u = this.plot;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? 10 : 1;
    const index = u.cursor.idx ?? u.data[0].length - 1;
    const { min, max } = u.scales.x;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = Math.min(Math.max(index + (event.key === "ArrowLeft" ? -step : step), 0), u.data[0].length - 1);
      u.setCursor({ left: u.valToPos(u.data[0][next], "x"), top: u.bbox.height / 2 });
      event.preventDefault();
    } else if (event.key === "+" || event.key === "-") {
      const centre = u.data[0][index] ?? (min + max) / 2;
      const factor = event.key === "+" ? 0.5 : 2;
      this.onZoom(centre - (centre - min) * factor, centre + (max - centre) * factor);
    } else if (event.key === "<" || event.key === ">") {
      const by = ((max - min) / 2) * (event.key === "<" ? -1 : 1);
      this.onZoom(min + by, max + by);
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
 * Return one entry of a legend.
 * @param {string} name name of the colour
 * @param {string} style
 * @param {string} word
 * @param {string | null} value null: an entry without a value
 */
function entry(name, style, word, value) {
  const part = document.createElement("span");
  const mark = document.createElement("i");
  mark.className = style;
  mark.style.color = `var(--${name.replace(/-faded$/, "")})`;
  part.append(mark, word);
  if (value !== null) {
    const text = document.createElement("b");
    text.textContent = value;
    part.append(text);
  }
  return part;
}
