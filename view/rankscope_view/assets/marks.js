// Marks on the canvas of a chart: hatched ranges, lines across the plot, glyphs in the lane above it, triangles at its edges.

/** Width in pixels of the names of tensors at the left of a heat map, with which the chart below it shares its axis. */
export const MAP_LEFT = typeof matchMedia === "function" && matchMedia("(max-width: 760px)").matches ? 96 : 150;

/** @type {Map<string, string>} */ const colours = new Map();
/** @type {Map<string, CanvasPattern | string>} */ const patterns = new Map();

/** Forget all colours, because the theme has changed. */
export function forgetColours() {
  colours.clear();
  patterns.clear();
}

/**
 * Return a colour of the style sheet as the canvas needs it. Each is computed once, because this costs a layout.
 * @param {string} name name of a token; `-faded` at its end reduces its weight
 * @returns {string}
 */
export function colour(name) {
  const known = colours.get(name);
  if (known) return known;
  const probe = document.createElement("i");
  probe.style.color = `var(--${name.replace(/-faded$/, "")})`;
  document.body.append(probe);
  const plain = getComputedStyle(probe).color;
  probe.remove();
  const found = name.endsWith("-faded") ? plain.replace(/^rgb\((.*)\)$/, "rgba($1, 0.4)") : plain;
  colours.set(name, found);
  return found;
}

/**
 * Return a pattern of diagonal stripes in the colours with these names.
 * @param {CanvasRenderingContext2D} context
 * @param {string} front
 * @param {string} back empty: transparent
 * @returns {CanvasPattern | string}
 */
export function hatch(context, front, back) {
  const known = patterns.get(`${front} ${back}`);
  if (known) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const inner = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
  if (back) {
    inner.fillStyle = colour(back);
    inner.fillRect(0, 0, 8, 8);
  }
  inner.strokeStyle = colour(front);
  inner.lineWidth = 2;
  for (const at of [-8, 0, 8]) {
    inner.moveTo(at - 1, 9);
    inner.lineTo(at + 9, -1);
  }
  inner.stroke();
  const found = context.createPattern(tile, "repeat") ?? colour(front);
  patterns.set(`${front} ${back}`, found);
  return found;
}

/** Return the font of labels on a canvas, in pixels of the device. */
export function labelFont() {
  if (!colours.has("font")) colours.set("font", getComputedStyle(document.body).fontFamily);
  return `${11 * devicePixelRatio}px ${colours.get("font")}`;
}

/**
 * Limit drawing to the plot.
 * @param {CanvasRenderingContext2D} context
 * @param {{left: number, top: number, width: number, height: number}} box
 */
export function clip(context, box) {
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
}

/**
 * Draw a line across the plot at a place of its axis.
 * @param {any} u
 * @param {number} at
 * @param {string} name name of the colour
 * @param {number[]} dash in CSS pixels
 * @param {number} alpha
 */
export function lineAcross(u, at, name, dash, alpha) {
  const context = u.ctx;
  const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
  context.globalAlpha = alpha;
  context.strokeStyle = colour(name);
  context.lineWidth = devicePixelRatio;
  context.setLineDash(dash.map((one) => one * devicePixelRatio));
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
export function triangle(context, x, y, half, height) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - half, y + height);
  context.lineTo(x + half, y + height);
  context.fill();
}

/**
 * Draw a ring around a point of a line, which remains visible inside it.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 */
export function ring(context, x, y) {
  context.strokeStyle = colour("failed");
  context.lineWidth = 1.3 * devicePixelRatio;
  context.beginPath();
  context.arc(x, y, 3.2 * devicePixelRatio, 0, 7);
  context.stroke();
}

/**
 * Draw a cross.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} size half of its width
 */
export function cross(context, x, y, size) {
  context.strokeStyle = colour("failed");
  context.lineWidth = 2 * devicePixelRatio;
  context.beginPath();
  context.moveTo(x - size, y - size);
  context.lineTo(x + size, y + size);
  context.moveTo(x + size, y - size);
  context.lineTo(x - size, y + size);
  context.stroke();
}

/**
 * Draw the mark of an event in the lane above a chart: incidents and restarts in the upper row, checkpoints in the middle one.
 * @param {CanvasRenderingContext2D} context
 * @param {string} group
 * @param {number} x
 * @param {number} top
 */
export function glyph(context, group, x, top) {
  const ratio = devicePixelRatio;
  const row = group === "incident" || group === "restart" ? 2 : group === "checkpoint" ? 1 : 0;
  const y = top - (8 + 13 * row) * ratio;
  const size = 4 * ratio;
  context.lineWidth = 2 * ratio;
  context.beginPath();
  if (group === "incident") {
    cross(context, x, y, size);
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
    context.lineWidth = 1.3 * ratio;
    context.arc(x, y, size * 0.9, 0, 7);
    context.stroke();
  }
}
