// Pure functions of heat maps: names of rows, and pooling of columns.

/**
 * Return the layer of a tensor, such as `layers.7`, or the beginning of its name.
 * @param {string} name
 * @returns {string}
 */
export function layerOf(name) {
  const parts = name.split(".");
  const at = parts.findIndex((part) => /^\d+$/.test(part));
  return at > 0 ? `${parts[at - 1]}.${parts[at]}` : parts[0];
}

/**
 * Return the part of its layer that a tensor is, such as `mlp.down_proj.weight`.
 * @param {string} name
 * @returns {string}
 */
export function partOf(name) {
  const parts = name.split(".");
  const at = parts.findIndex((part) => /^\d+$/.test(part));
  return parts.slice(at + 1).join(".").replace(/\d+/g, "#");
}

/**
 * Return the codes of a grid with at most `columns` columns. Of several cells, the one farthest from `middle` remains;
 * codes above 253, of Inf and NaN, have priority, and 253 means an absent cell.
 * @param {Uint8Array} cells
 * @param {number} rows
 * @param {number} columns
 * @param {number} middle
 * @returns {Uint8Array}
 */
export function poolColumns(cells, rows, columns, middle) {
  const wide = cells.length / rows;
  if (wide <= columns) return cells;
  const found = new Uint8Array(rows * columns).fill(253);
  const weights = Float64Array.from({ length: 256 }, (_, code) => (code === 253 ? -1 : code > 253 ? 1000 + code : Math.abs(code - middle)));
  for (let row = 0; row < rows; row += 1) {
    for (let at = 0; at < wide; at += 1) {
      const target = row * columns + Math.floor((at * columns) / wide);
      const code = cells[row * wide + at];
      if (weights[code] > weights[found[target]]) found[target] = code;
    }
  }
  return found;
}
