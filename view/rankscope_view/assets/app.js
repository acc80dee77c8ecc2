// Behaviour of all pages: theme, keys, live updates; each page adds its own.
import { Chart } from "./chart.js";
import { fillPending, follow, refresh, repeat } from "./live.js";
import { forgetColours } from "./marks.js";
import { keep, recall, setAddress } from "./memory.js";
import { readState, replaceState, STRENGTH, writeState } from "./logic.js";
import { showBehind, showNewest } from "./newest.js";
import { readCurve, sheet } from "./source.js";
import { grown, merged } from "./tail.js";

const base = document.body.dataset.base ?? "";
const page = document.body.dataset.page ?? "";
/** @type {Record<string, () => void>} */ const keys = {};
/** @type {Record<string, string>} */ const words = { T: "change the theme", "?": "show the keys" };
/** @type {Record<string, string>} Pages by the key behind `g`. */
const PLACES = { r: "runs", o: "overview", t: "tensors", k: "ranks", i: "incidents", e: "events", c: "compare" };
/** @type {Record<string, string>} */
const CHART_KEYS = {
  "← →": "in a chart: move the cursor, with Shift by ten",
  "+ −": "in a chart: zoom around the cursor",
  "< >": "in a chart: pan by half of its window",
  drag: "in a chart: zoom; with Shift pan; a double click shows the whole range",
};
/** Scalars without an average: an evaluation is a mean already, and a rate has no noise. */
const EXACT = /^learning_rate$|^(eval|evaluation|val|valid|validation|test|dev)[_/]/;
/** @type {Record<string, string>} */
const MAP_KEYS = { "← → ↑ ↓": "in a heat map: move the cursor, with Shift by ten", Enter: "in a heat map: open the tensor, or zoom" };
/** @type {(() => Promise<void>)[]} */ const updates = [() => refresh(location.href, true)];
/** @type {((rows: import("./tail.js").Row[], isNew: boolean) => void)[]} */ const extensions = [];
/** @type {(() => void)[]} */ const redraws = [forgetColours];

/** @param {string} id */
const byId = (id) => document.getElementById(id);

/**
 * @param {string} key
 * @param {string} word
 * @param {() => void} action
 */
function bind(key, word, action) {
  keys[key] = action;
  if (word) words[key] = word;
}

function changeTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  keep("theme", root.dataset.theme);
  redraws.forEach((redraw) => redraw());
}

function showKeys() {
  const dialog = document.createElement("dialog");
  const table = document.createElement("table");
  const row = (/** @type {string} */ key, /** @type {string} */ word) => {
    const line = table.insertRow();
    const name = document.createElement("kbd");
    name.textContent = key;
    line.insertCell().append(name);
    line.insertCell().textContent = word;
  };
  for (const [key, word] of Object.entries(words)) row(key, word);
  for (const [selector, list] of /** @type {[string, Record<string, string>][]} */ ([[".plot[data-chart]", CHART_KEYS], [".heat", MAP_KEYS]])) {
    if (!document.querySelector(selector)) continue;
    for (const [key, word] of Object.entries(list)) row(key, word);
  }
  const note = document.createElement("p");
  note.className = "dim";
  note.textContent = "Charts: uPlot, © 2021 Leon Sorokin, MIT licence.";
  dialog.append(table, note);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/**
 * Open the page behind a link, if there is one.
 * @param {string} selector
 */
function go(selector) {
  /** @type {HTMLAnchorElement | null} */ (document.querySelector(selector))?.click();
}

bind("T", "", changeTheme);
bind("?", "", showKeys);
for (const [key, word] of Object.entries(PLACES)) {
  if (document.querySelector(`[data-go=${key}]`)) words[`g ${key}`] = word;
}
if (document.querySelector("[data-go=i]")) {
  // On other pages than that of an incident, the first and the last open one are the nearest.
  const items = ".item[href*='/incidents/'], .list a[href*='/incidents/']";
  const edge = (/** @type {number} */ at) => /** @type {HTMLAnchorElement | undefined} */ ([...document.querySelectorAll(items)].at(at))?.click();
  const step = (/** @type {string} */ rel, /** @type {number} */ at) => (document.querySelector("a[rel=prev], a[rel=next]") ? go(`a[rel=${rel}]`) : edge(at));
  bind("[", "previous incident", () => step("prev", -1));
  bind("]", "next incident", () => step("next", 0));
}
byId("theme")?.addEventListener("click", changeTheme);
byId("help")?.addEventListener("click", showKeys);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));

let isGoing = false; // whether the key before was `g`
document.addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || target.matches("input:not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (document.querySelector("dialog")) return;
  const action = isGoing ? PLACES[event.key] && (() => go(`[data-go=${event.key}]`)) : keys[event.key];
  isGoing = event.key === "g" && !isGoing;
  if (action) action();
  if (action || isGoing) event.preventDefault();
});

if (page === "list") list();
if (document.querySelector(".plot[data-chart]")) charts();
if (page === "ranks") setInterval(showBehind, 1000);
void fillPending();
if (document.querySelector(".heat")) void import("./heat.js").then((heat) => heat.start(bind, updates, redraws));
document.addEventListener("click", (event) => {
  const button = /** @type {HTMLElement} */ (event.target).closest(".copy"); // live updates replace buttons
  if (button) void copy(/** @type {HTMLElement} */ (button));
});
if (document.body.dataset.refresh) repeat(() => refresh(location.href, false), Number(document.body.dataset.refresh));
if (document.body.dataset.version) {
  const run = page === "run" ? (byId("run")?.dataset.run ?? "") : "";
  follow(async () => void (await Promise.all(updates.slice(0, document.hidden ? 1 : undefined).map((update) => update()))), run, (rows, isNew) => extensions.forEach((extend) => extend(rows, isNew)));
}

/**
 * Copy the text of a button or of the element that it names.
 * @param {HTMLElement} button
 */
async function copy(button) {
  const text = button.dataset.text ?? byId(button.dataset.copy ?? "")?.textContent ?? "";
  const toast = document.createElement("div");
  toast.className = "toast";
  toast.setAttribute("role", "status");
  try {
    await navigator.clipboard.writeText(text);
    toast.textContent = "copied";
  } catch {
    toast.textContent = "The browser does not permit copying here: select the text.";
  }
  document.body.append(toast);
  setTimeout(() => toast.remove(), 1600);
}

/** The list of runs: search, cursor, selection. */
function list() {
  const search = /** @type {HTMLInputElement} */ (byId("search"));
  const rows = () => /** @type {HTMLTableRowElement[]} */ ([...document.querySelectorAll("#runs tbody tr")]);
  const chosen = () => /** @type {HTMLInputElement[]} */ ([...document.querySelectorAll("#runs input:checked")]);
  let timer = 0;
  search?.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const url = new URL(location.href);
      url.searchParams.set("q", search.value);
      history.replaceState(null, "", url);
      void refresh(url.href, false);
    }, 200);
  });
  const move = (/** @type {number} */ by) => {
    const all = rows();
    const at = all.findIndex((row) => row.classList.contains("cursor"));
    all[at]?.classList.remove("cursor");
    const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    next?.classList.add("cursor");
    next?.scrollIntoView({ block: "nearest" });
  };
  const current = () => document.querySelector("#runs tr.cursor");
  const changed = () => {
    const names = chosen().map((box) => box.value);
    const [count, words, button] = [byId("selected"), byId("names"), byId("compare")];
    if (count) count.textContent = `${names.length} run${names.length === 1 ? "" : "s"} selected`;
    if (words) words.textContent = names.join(" · ");
    button?.setAttribute("aria-disabled", String(names.length < 2));
  };
  document.addEventListener("change", changed);
  document.addEventListener("reset", () => setTimeout(changed));
  document.addEventListener("submit", (event) => {
    if (chosen().length < 2 && /** @type {HTMLElement} */ (event.target).querySelector("#compare")) event.preventDefault();
  });
  bind("/", "search", () => search?.focus());
  bind("j", "next run", () => move(1));
  bind("k", "previous run", () => move(-1));
  bind("x", "select the run", () => {
    /** @type {HTMLElement | null} */ (current()?.querySelector("input") ?? null)?.click();
  });
  bind("Enter", "open the run", () => {
    /** @type {HTMLElement | null} */ (current()?.querySelector("a") ?? null)?.click();
  });
  bind("c", "compare the selected runs", () => byId("compare")?.click());
  bind("Escape", "clear the selection", () => byId("clear")?.click());
  changed();
}

/** The charts of a run, and the choices above them. */
function charts() {
  if (typeof uPlot === "undefined") return; // the charts of the server remain
  const holder = /** @type {HTMLElement} */ (byId("run") ?? byId("heat"));
  const run = holder.dataset.run ?? "";
  const usual = document.body.dataset.axis ?? "step";
  let state = readState(location.search, usual);
  /** @type {Chart[]} */ const all = [];
  /** @type {Map<Chart, import("./logic.js").Curve>} The curves as the server sent them. */ const loaded = new Map();
  /** @type {Map<Chart, import("./tail.js").Grown>} The curves as they were drawn, with rows that are not stored yet. */ const drawn = new Map();
  /** @type {import("./tail.js").Row[]} */ let tail = [];
  /** @type {Set<Element>} The places of metrics that are in view or near it: only these are drawn. */ const near = new Set();
  const zoom = (/** @type {number | null} */ from, /** @type {number | null} */ to) => set({ from, to });

  const draw = async (/** @type {Chart} */ chart) => {
    if (!chart.box.offsetParent || (chart.options.keys && !near.has(chart.box))) return;
    const own = windowOf(chart, state);
    const query = new URLSearchParams(writeState(own));
    query.set("name", chart.options.name);
    query.set("markers", "1");
    const { tensor, kind, attempt } = chart.box.dataset;
    for (const [name, value] of [...new URLSearchParams(holder.dataset.query), ...Object.entries({ run, tensor, kind, attempt })]) if (value || (name === "tensor" && value === "")) query.set(name, value);
    const curve = await readCurve(`${base}/data/${chart.options.compare ? "compare" : "curve"}`, query, own);
    if (chart.box.dataset.firsts) curve.markers = JSON.parse(chart.box.dataset.firsts).map((/** @type {[string, number]} */ [letter, step]) => ["incident", step, step, letter, true]);
    loaded.set(chart, curve);
    plan([chart]);
    const notice = chart.box.parentElement?.querySelector(".notice");
    if (notice?.firstChild) notice.firstChild.textContent = notice.querySelector(".axisword") ? `${curve.notice} · ` : curve.notice;
  };
  const update = async () => void (await Promise.all(all.map(draw)));

  /** @type {Set<Chart>} */ const planned = new Set();
  /**
   * Draw charts before the next picture of the screen: each at most once, with the rows that are not stored yet.
   * @param {Iterable<Chart>} charts
   */
  function plan(charts) {
    const isFirst = !planned.size;
    for (const chart of charts) planned.add(chart);
    if (!isFirst || !planned.size) return;
    requestAnimationFrame(() => {
      const visible = [...planned].filter((chart) => chart.box.offsetParent && (!chart.options.keys || near.has(chart.box))); // read before all changes: after each, it costs a layout
      for (const chart of visible) {
        const [curve, own] = [loaded.get(chart), windowOf(chart, state)];
        if (!curve) continue;
        const next = grown(drawn.get(chart), curve, tail, own);
        drawn.set(chart, next);
        chart.show(next.shown, own);
      }
      planned.clear();
      showNewest(tail);
    });
  }

  const extend = (/** @type {import("./tail.js").Row[]} */ rows, /** @type {boolean} */ isNew) => {
    tail = merged(isNew ? [] : tail, rows);
    for (const row of rows) for (const name of Object.keys(row[3])) if (!known.has(name)) addMetric(name, row);
    plan(loaded.keys());
  };

  /** @param {Partial<import("./logic.js").State>} changes */
  function set(changes) {
    state = { ...state, ...changes };
    setAddress(replaceState(location.search, state, usual));
    marks();
    void update();
  }
  const marks = () => {
    for (const link of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("#toolbar .segmented a"))) {
      const { axis, smooth, log } = link.dataset;
      const isChosen = axis ? axis === state.axis : smooth ? smooth === state.smooth : Boolean(log) === state.log;
      isChosen ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }
    byId("whole")?.classList.toggle("off", state.from === null && state.to === null);
    for (const [id, isOn] of /** @type {[string, boolean][]} */ ([["cut", state.cut], ["tail", Boolean(state.tail)]])) {
      isOn ? byId(id)?.setAttribute("aria-current", "true") : byId(id)?.removeAttribute("aria-current");
    }
    const [slider, word] = [/** @type {HTMLInputElement | null} */ (byId("strength")), byId("strength-word")];
    if (!slider) return;
    const isAverage = state.smooth === "average" || state.smooth === "both";
    Object.assign(slider, { min: isAverage ? "2" : "0", max: isAverage ? "200" : "0.99", step: isAverage ? "1" : "0.01", disabled: state.smooth === "none" });
    slider.value = String(state.strength);
    if (word) word.textContent = state.smooth === "none" ? "" : isAverage ? `${state.smooth === "both" ? `α ${STRENGTH.ema}, ` : ""}${state.strength} rows` : `α ${state.strength}`;
  };

  /** @type {Map<Element, Chart>} */ const made = new Map();
  const make = (/** @type {HTMLElement} */ box) => {
    const chart = new Chart(box, optionsOf(box), zoom, () => zoom(null, null));
    made.set(box, chart);
    all.push(chart);
    box.parentElement?.querySelector(".save")?.addEventListener("click", (event) => menu(/** @type {HTMLElement} */ (event.currentTarget), chart, run));
    return chart;
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      isIntersecting ? near.add(target) : near.delete(target);
      if (isIntersecting) void draw(made.get(target) ?? make(/** @type {HTMLElement} */ (target)));
    }
  }, { rootMargin: "200px" });
  /** @type {Set<string>} The scalars that have a chart. */ const known = new Set(["perplexity"]);
  for (const box of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".plot[data-chart]"))) {
    const { name, keys } = optionsOf(box);
    for (const one of keys ?? [name]) known.add(one).add(one.split('{"')[0]);
    keys ? watch.observe(box) : make(box);
  }
  const addMetric = (/** @type {string} */ name, /** @type {import("./tail.js").Row} */ row) => {
    known.add(name);
    const end = name.indexOf('{"');
    if (end < 0 || !row[3][name.slice(0, end)]) newMetric(name).forEach((box) => watch.observe(box)); // otherwise a line of a metric
  };
  searchMetrics();
  // Rows of the machine, and those of very many names, do not come with the rows of the training.
  const comes = (/** @type {string[]} */ keys) => keys.some((key) => tail.some((row) => row[3][key]));
  const fetchOthers = () => {
    for (const box of document.hidden ? [] : near) if (!comes(optionsOf(/** @type {HTMLElement} */ (box)).keys ?? [])) void draw(/** @type {Chart} */ (made.get(box)));
  };
  if (document.body.dataset.live) setInterval(fetchOthers, 10_000);
  const more = /** @type {HTMLDetailsElement | null} */ (byId("more"));
  more?.addEventListener("toggle", () => {
    keep("more", more.open ? "1" : "");
    void update();
  });
  // Open from the beginning, but on a narrow screen the incidents below come first.
  const kept = recall("more");
  if (more && (kept === "" || (kept === null && matchMedia("(max-width: 760px)").matches))) more.open = false;
  if (matchMedia("(max-width: 760px)").matches) for (const group of /** @type {NodeListOf<HTMLDetailsElement>} */ (document.querySelectorAll("#metrics details"))) group.open = false;
  byId("toolbar")?.addEventListener("click", (event) => {
    const link = /** @type {HTMLElement} */ (event.target).closest("a");
    if (!link) return;
    event.preventDefault();
    const { axis, smooth, log } = link.dataset;
    if (axis) set({ axis, from: null, to: null });
    else if (smooth) set({ smooth, strength: STRENGTH[smooth] });
    else if (log !== undefined) set({ log: Boolean(log) });
    else if (link.id === "cut") set({ cut: !state.cut });
    else if (link.id === "tail") set({ tail: state.tail ? 0 : 4000, from: null, to: null });
    else zoom(null, null);
  });
  byId("strength")?.addEventListener("change", (event) => set({ strength: Number(/** @type {HTMLInputElement} */ (event.target).value) }));
  ["step", "cumulative", "attempt", "arrival", "time"].forEach((axis, at) => bind(String(at + 1), `axis: ${axis}`, () => set({ axis, from: null, to: null })));
  bind("s", "smoothing", () => {
    const smooth = { ema: "average", average: "both", both: "none" }[state.smooth] ?? "ema";
    set({ smooth, strength: STRENGTH[smooth] });
  });
  bind("l", "logarithmic scale", () => set({ log: !state.log }));
  bind("o", "cut outliers off the axis", () => set({ cut: !state.cut }));
  bind("0", "whole range", () => zoom(null, null));
  bind("m", "more charts", () => more && (more.open = !more.open));
  addEventListener("popstate", () => {
    state = readState(location.search, usual);
    marks();
    void update();
  });
  redraws.push(() => void update());
  updates.push(update);
  extensions.push(extend);
  marks();
  void update();
}

/**
 * @param {HTMLElement} box
 * @returns {import("./chart.js").Options}
 */
function optionsOf(box) {
  return JSON.parse(box.dataset.chart ?? "{}");
}

/**
 * Add a chart of a scalar that appeared after the page was loaded, and return its place, if the page has charts of metrics.
 * @param {string} name
 * @returns {HTMLElement[]}
 */
function newMetric(name) {
  const forms = /** @type {HTMLTemplateElement | null} */ (byId("metricforms"));
  const list = byId("metrics");
  if (!forms || !list) return [];
  const form = /** @type {HTMLElement} */ (/** @type {HTMLElement} */ (forms.content.firstElementChild).cloneNode(true));
  const known = JSON.parse(forms.dataset.titles ?? "{}")[name];
  const title = known ?? name;
  const group = known ?? (name.indexOf("/") > 0 ? name.slice(0, name.indexOf("/")) : "Own metrics");
  const panel = /** @type {HTMLElement} */ (form.querySelector(".metric"));
  const box = /** @type {HTMLElement} */ (panel.querySelector(".plot"));
  box.dataset.chart = JSON.stringify({ ...optionsOf(box), name, keys: [name] });
  box.setAttribute("aria-label", title);
  const word = /** @type {HTMLElement} */ (panel.querySelector("h2 bdi"));
  [word.textContent, word.title] = [title, name];
  const more = known ? byId("more") : null;
  let place = more ?? [.../** @type {NodeListOf<HTMLElement>} */ (list.querySelectorAll("details"))].find((one) => one.dataset.group === group);
  if (!place) {
    place = form;
    place.dataset.group = group;
    /** @type {HTMLElement} */ (place.querySelector("summary bdi")).textContent = group;
    place.querySelector(".grid2")?.replaceChildren();
    list.insertBefore(place, list.querySelector("details[data-group='Host and GPU'], details[data-group='Step phases and monitor']"));
  }
  list.hidden = list.hidden && Boolean(more);
  const words = more?.querySelector("summary")?.firstChild;
  if (words) words.textContent = `${words.textContent?.trim()}, ${title.toLowerCase()} `;
  place.querySelector(".grid2")?.append(panel);
  const count = place.querySelectorAll(".chartbox").length;
  /** @type {HTMLElement} */ (place.querySelector("summary .dim")).textContent = `${count} chart${count === 1 ? "" : "s"}`;
  return [box];
}

/** Show only those charts of metrics whose names have all words of the search; their groups are opened. */
function searchMetrics() {
  const field = /** @type {HTMLInputElement | null} */ (byId("metricsearch"));
  /** @type {Map<HTMLDetailsElement, boolean>} */ const before = new Map();
  field?.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of /** @type {NodeListOf<HTMLDetailsElement>} */ (document.querySelectorAll("#metrics details"))) {
      if (!before.has(group)) before.set(group, group.open);
      let found = 0;
      for (const panel of /** @type {NodeListOf<HTMLElement>} */ (group.querySelectorAll(".metric"))) {
        const word = /** @type {HTMLElement | null} */ (panel.querySelector("h2 bdi"));
        const name = `${word?.textContent} ${word?.title}`.toLowerCase();
        panel.hidden = !words.every((word) => name.includes(word));
        found += panel.hidden ? 0 : 1;
      }
      group.hidden = !found;
      group.open = words.length ? true : Boolean(before.get(group));
    }
    if (!words.length) before.clear();
  });
}

/**
 * Return the choices of a chart: charts of an incident begin with a window and an axis of their own.
 * @param {Chart} chart
 * @param {import("./logic.js").State} state
 */
function windowOf(chart, state) {
  const { from, to, axis } = chart.box.dataset;
  if (EXACT.test(chart.options.name)) state = { ...state, smooth: "none", strength: 0 };
  if (!from || !to || state.from !== null) return axis ? { ...state, axis } : state;
  return { ...state, axis: axis ?? state.axis, from: Number(from), to: Number(to), smooth: "none", strength: 0 };
}

/**
 * Offer the data of a chart as CSV and its picture as PNG.
 * @param {HTMLElement} button
 * @param {Chart} chart
 * @param {string} run
 */
function menu(button, chart, run) {
  document.querySelector(".menu")?.remove();
  const box = document.createElement("div");
  box.className = "menu";
  const rows = document.createElement("a");
  [rows.textContent, rows.href] = sheet(`${base}/data/curve.csv`, new URLSearchParams({ run, name: chart.options.name }), chart.curve);
  rows.download = `${chart.options.name}.csv`;
  const picture = document.createElement("a");
  picture.textContent = "PNG, as drawn";
  picture.href = "#";
  picture.addEventListener("click", (event) => {
    event.preventDefault();
    chart.picture();
  });
  box.append(rows, picture);
  button.parentElement?.append(box);
  setTimeout(() => document.addEventListener("click", () => box.remove(), { once: true }));
}
