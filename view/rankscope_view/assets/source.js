// Data of charts: from the server, or in a report from the document itself.
import { csv, expanded, sliced } from "./logic.js";

/** @typedef {import("./logic.js").Curve} Curve */

/** @type {Record<string, Record<string, import("./logic.js").Kept>> | null} The curves of a report, by axis and name. */
const kept = JSON.parse(document.getElementById("curves")?.textContent ?? "null");

/**
 * Return the curve that `query` describes.
 * @param {string} address
 * @param {URLSearchParams} query
 * @param {import("./logic.js").State} state
 * @returns {Promise<Curve>}
 */
export async function readCurve(address, query, state) {
  if (kept) {
    const offered = kept[state.axis] ?? Object.values(kept)[0]; // a file can have fewer axes than there are keys
    return sliced(expanded(offered[query.get("name") ?? ""], state.smooth !== "none"), state);
  }
  const answer = await fetch(`${address}?${query}`);
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

/**
 * Return the word and the address of the rows of a chart as CSV.
 * @param {string} address
 * @param {URLSearchParams} query
 * @param {Curve | null} curve
 * @returns {[string, string]}
 */
export function sheet(address, query, curve) {
  if (!kept || !curve) return ["CSV, all stored rows", `${address}?${query}`];
  return ["CSV, as drawn", URL.createObjectURL(new Blob([csv(curve)], { type: "text/csv" }))];
}
