// Follow the store: when a version is committed, the parts of the page that changed are replaced.
import { keptOrder } from "./logic.js";
import { showAge, showLatest } from "./newest.js";
import { QUIET, join } from "./stream.js";

const base = document.body.dataset.base ?? "";

/**
 * Return the document at `url`. An XMLHttpRequest parses it without a script that writes HTML.
 * @param {string} url
 * @returns {Promise<Document>}
 */
export function load(url) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("GET", url);
    request.responseType = "document";
    request.onload = () => (request.response && request.status < 400 ? resolve(request.response) : reject(new Error(String(request.status))));
    request.onerror = () => reject(new Error("connection refused"));
    request.send();
  });
}

/**
 * Replace each part of the page that has another content at `url`.
 * @param {string} url
 * @param {boolean} keepsOrder rows of the list remain in their places
 */
export async function refresh(url, keepsOrder) {
  if (!document.querySelector("[data-live][id]")) return;
  const next = await load(url);
  const stepOf = () => document.getElementById("head")?.dataset.step;
  const before = stepOf();
  for (const part of document.querySelectorAll("[data-live][id]")) {
    const other = next.getElementById(part.id);
    if (!other) return location.reload(); // another page: the first run, or the first loss
    if (part.isEqualNode(other)) continue;
    const fresh = /** @type {HTMLElement} */ (document.importNode(other, true));
    if (part.id === "runs") merge(/** @type {HTMLElement} */ (part), fresh, keepsOrder);
    const scroll = part.querySelector(".scroll")?.scrollTop ?? 0;
    for (const one of part.querySelectorAll("details[open][id]")) fresh.querySelector(`details#${one.id}`)?.setAttribute("open", "");
    part.replaceWith(fresh);
    if (part.id === "head") showLatest(); // the store is behind the rows that the page has received
    const box = fresh.querySelector(".scroll");
    if (box) box.scrollTop = scroll;
  }
  showAge(stepOf() !== before);
  document.title = next.title;
  await fillPending();
}

/** @type {Map<string, string[]>} Texts that were received before, by address. */
const received = new Map();

/** Request the figures that take long to calculate, and show them in place of the links that calculate them. */
export async function fillPending() {
  for (const line of document.querySelectorAll("[data-pending]")) {
    const url = /** @type {HTMLElement} */ (line).dataset.pending ?? "";
    const value = line.closest("dd")?.querySelector("[data-value]");
    const show = (/** @type {string[]} */ texts) => {
      if (value) value.textContent = texts[0];
      line.textContent = texts[1];
    };
    const known = received.get(url);
    if (known) show(known);
    const answer = await fetch(url).catch(() => null);
    if (!answer?.ok) continue; // the link remains
    const texts = (await answer.json()) ?? ["–", ""];
    received.set(url, texts);
    show(texts);
  }
}

/**
 * Carry selection and order of the rows over to the new table.
 * @param {HTMLElement} before
 * @param {HTMLElement} after
 * @param {boolean} keepsOrder
 */
function merge(before, after, keepsOrder) {
  const boxes = (/** @type {HTMLElement} */ table) => /** @type {HTMLInputElement[]} */ ([...table.querySelectorAll("input[name=run]")]);
  const selected = new Set(boxes(before).filter((box) => box.checked).map((box) => box.value));
  const rows = new Map(boxes(after).map((box) => [box.value, box]));
  for (const [value, box] of rows) box.checked = selected.has(value);
  if (!keepsOrder) return;
  const order = keptOrder(boxes(before).map((box) => box.value), [...rows.keys()]);
  const cursor = before.querySelector("tr.cursor input");
  for (const value of order) {
    const row = rows.get(value)?.closest("tr");
    if (row) after.querySelector("tbody")?.append(row);
    if (cursor instanceof HTMLInputElement && cursor.value === value) row?.classList.add("cursor");
  }
}

/** Interval in milliseconds at which a page repeats to the shared connection what it wants. */
const REPEAT = 5000;

/**
 * Return the port of the connection that all pages of this browser share in a worker, or of one of this page.
 * @param {boolean} isOwn whether the connection is of this page only, as in a browser without such workers
 */
function portOf(isOwn) {
  const own = /** @type {HTMLScriptElement | null} */ (document.querySelector("script[src$='/app.js']"))?.src ?? "";
  if (!isOwn && "SharedWorker" in window) {
    const rules = { createScriptURL: (/** @type {string} */ one) => one }; // pages permit no other text as a script
    const address = /** @type {any} */ (window).trustedTypes?.createPolicy("rankscope", rules) ?? rules;
    return new SharedWorker(address.createScriptURL(own.replace("app.js", "stream.js")), { type: "module" }).port;
  }
  const here = new MessageChannel();
  join(here.port1);
  return here.port2;
}

/**
 * Call `update` once per version of the store, and `extend` with new rows of the run of the page. Mark the page if the
 * connection is lost. A hidden page receives versions and no rows, so that its state and title remain true.
 * @param {() => Promise<void>} update
 * @param {string} run empty: a page of several runs
 * @param {(rows: import("./tail.js").Row[], isNew: boolean) => void} extend the first rows of a new connection are not behind those before
 */
export function follow(update, run, extend) {
  let version = Number(document.body.dataset.version); // the newest one that is known here
  let heard = Date.now(); // time of the last event, in milliseconds
  let opened = 0; // number of connections so far; rows may have been missed before all but the first
  let isBusy = false;
  let isWaiting = false;
  let isLost = false; // whether a worker has ended, or could not begin
  const next = async () => {
    if (isBusy) {
      isWaiting = true;
      return;
    }
    isBusy = true;
    isWaiting = false;
    try {
      await update();
      late(false);
    } catch {
      late(true);
    }
    isBusy = false;
    if (isWaiting) setTimeout(next, 100); // the newest version is never left out
  };
  const changed = (/** @type {number} */ newest) => {
    if (newest > version) void next();
    version = Math.max(version, newest);
  };
  /** @type {Record<string, (data: any, isNew: boolean) => void>} */
  const actions = {
    open: () => ((opened += 1) > 1 ? void next() : late(false)),
    ping: () => late(false),
    lost: () => late(true),
    message: changed,
    rows: extend,
  };
  const attach = () => {
    const one = portOf(!opened && isLost);
    one.onmessage = ({ data: { kind, data, isNew } }) => {
      heard = Date.now();
      actions[kind](data, isNew);
    };
    return one;
  };
  let port = attach();
  const send = () => port.postMessage({ address: new URL(`${base}/data/live`, location.href).href, run: document.hidden ? "" : run, version });
  send();
  document.addEventListener("visibilitychange", send);
  document.addEventListener("freeze", () => late(true)); // the browser stops a page that is hidden for long
  addEventListener("pagehide", () => port.postMessage(null));
  setInterval(() => {
    if (Date.now() - heard > QUIET + REPEAT) {
      late(true);
      port.postMessage(null);
      isLost = true;
      port = attach();
      heard = Date.now();
    }
    send();
  }, REPEAT);
}

/**
 * Call `update` every `seconds` while the page is visible, and mark the page if the connection is lost.
 * @param {() => Promise<void>} update
 * @param {number} seconds
 */
export function repeat(update, seconds) {
  setInterval(() => {
    if (!document.hidden) update().then(() => late(false), () => late(true));
  }, 1000 * seconds);
}

/** @param {boolean} isLate */
function late(isLate) {
  document.body.classList.toggle("late", isLate);
  document.title = `${isLate ? "Late: " : ""}${document.title.replace(/^Late: /, "")}`;
  const word = document.querySelector(".live span");
  if (word && (isLate || word.textContent?.startsWith("Late"))) word.textContent = isLate ? `Late since ${word.textContent?.startsWith("Late") ? word.textContent.slice(11) : new Date().toISOString().slice(11, 19)}` : "Live";
}
