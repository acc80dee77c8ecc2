// The one connection of all open pages of a browser to the service, because a browser permits only six to one server.
// The script runs in a shared worker, or in the page if there is none.

/** @typedef {{address: string, run: string, version: number}} Wanted the run of a page, empty for a page of several runs or a hidden page, and its version */
/** @typedef {{kind: string, data?: any, isNew?: boolean}} News an event of the connection; `isNew`: rows may have been missed before it */

/** Time in milliseconds without an event after which the connection is opened again. The server sends one every 15 s. */
export const QUIET = 40_000;

/** Time in milliseconds after which a page that sends nothing is closed. A browser runs timers of hidden pages once a minute. */
const GONE = 150_000;

/** @type {Map<MessagePort, Wanted & {at: number, isNew: boolean}>} */ const pages = new Map();
/** @type {EventSource | null} */ let source = null;
let heard = 0; // time of the last event, in milliseconds
let runs = ""; // those of the connection
let timer = 0;

/**
 * Send the news to a page while it sends what it wants. A page that sends null gets none.
 * @param {MessagePort} port
 */
export function join(port) {
  port.onmessage = ({ data: wanted }) => {
    const known = pages.get(port);
    const isOther = known?.run !== wanted?.run; // also that of a page that was hidden or is shown
    if (wanted) pages.set(port, { ...wanted, at: Date.now(), isNew: isOther || (known?.isNew ?? true) });
    else pages.delete(port);
    if (isOther || !wanted) connect(Boolean(wanted));
    timer ||= setInterval(check, 1000);
  };
}

/** @param {boolean} isNeeded whether to connect also if the connection has all runs of the pages */
function connect(isNeeded) {
  const wanted = [...pages.values()];
  const now = JSON.stringify([...new Set(wanted.map((page) => page.run))].sort());
  if (!isNeeded && now === runs) return;
  source?.close();
  source = null;
  runs = now;
  if (!wanted.length) return;
  const query = new URLSearchParams(JSON.parse(runs).map((/** @type {string} */ run) => ["run", run]));
  query.set("version", String(Math.min(...wanted.map((page) => page.version))));
  const one = new EventSource(`${wanted[0].address}?${query}`);
  source = one;
  heard = Date.now();
  for (const kind of ["open", "ping", "message", "rows"]) {
    one.addEventListener(kind, (event) => {
      heard = Date.now();
      const text = /** @type {MessageEvent} */ (event).data;
      pass(kind, text && JSON.parse(text));
    });
  }
  one.onerror = () => source === one && lost();
}

/**
 * Send an event to the pages that it concerns.
 * @param {string} kind
 * @param {any} data
 */
function pass(kind, data) {
  for (const [port, page] of pages) {
    const isOfRun = kind === "rows" || kind === "message";
    if (kind === "open" ? !page.isNew : isOfRun && data[0] !== page.run) continue;
    port.postMessage(/** @type {News} */ ({ kind, data: isOfRun ? data[1] : data, isNew: page.isNew }));
    if (kind === "rows") page.isNew = false;
  }
}

function lost() {
  for (const [port, page] of pages) {
    page.isNew = true;
    port.postMessage(/** @type {News} */ ({ kind: "lost" }));
  }
}

/** Forget closed pages. A browser does not connect again after an answer that is no stream, and misses a lost network. */
function check() {
  const now = Date.now();
  for (const [port, page] of pages) if (now - page.at > GONE) pages.delete(port);
  connect(false);
  if (!source || now - heard <= (source.readyState === EventSource.CLOSED ? QUIET / 8 : QUIET)) return;
  lost();
  connect(true);
}

const scope = /** @type {any} */ (globalThis);
if ("SharedWorkerGlobalScope" in scope) scope.onconnect = (/** @type {MessageEvent} */ event) => join(event.ports[0]);
