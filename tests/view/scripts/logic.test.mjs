// Pure functions of the pages. `node --test` runs this file; tests/view/test_scripts.py starts it.
import assert from "node:assert/strict";
import { test } from "node:test";

import { clipped, common } from "../../../view/rankscope_view/assets/heat_marks.js";
import { byteSize, logTicks, csv, duration, expanded, keptOrder, nearest, perplexityRange, placeLabel, readState, replaceState, roundSteps, shown, sliced, stepSplits, tickLabel, valueRange, viridis, writeState } from "../../../view/rankscope_view/assets/logic.js";
import { alone, badRange, seriesOf, valueText } from "../../../view/rankscope_view/assets/series.js";
import { contextOf, extended, grown, ranksNote, secondsLeft } from "../../../view/rankscope_view/assets/tail.js";

const line = { label: null, x: [0, 1, 2, 3], step: [30, 10, 20, 30], value: [4, null, 2, 1], smoothed: [4, null, 3, 2], low: [], high: [] };
const curve = { name: "loss", axis: "arrival", lines: [line], nonfinite: [], restarts: [1], rows: 4, buckets: 0, extent: [0, 3], bulk: [1, 2], notice: "" };

test("an address restores all choices", () => {
  const search = "axis=arrival&smooth=average&strength=7&from=1.5&to=9&log=1&cut=1&tail=4000";
  assert.deepEqual({ axis: "arrival", smooth: "average", strength: 7, from: 1.5, to: 9, log: true, cut: true, tail: 4000 }, readState(search));
  assert.equal(search, writeState(readState(search)));
  assert.equal("", writeState(readState("")));
});

test("a zoom keeps the other parts of an address", () => {
  const state = { ...readState(""), from: 3, to: 9 };
  assert.equal("a=x+y&b=z&from=3&to=9", replaceState("a=x%20y&axis=time&b=z&from=1", state));
});

test("unknown choices are the default", () => {
  assert.deepEqual(readState(""), readState("axis=x&smooth=y&from=z&strength=NaN&tail=q"));
});

test("numbers keep four digits, and NaN and absence are words", () => {
  assert.deepEqual(["2.870", "1.03e-4", "12,480", "NaN", "∞", "–", "0"], [2.87, 1.03e-4, 12480, NaN, Infinity, null, 0].map(shown));
});

test("bytes have binary units on the axis and in the legend of a chart", () => {
  assert.deepEqual(["17.51 GiB", "512 MiB", "1.5 KiB", "0 B"], [1.88e10, 2 ** 29, 1536, 0].map(byteSize));
  const memory = { ...curve, name: "device_memory_allocated_bytes", lines: [{ ...line, value: line.value.map(() => 2 ** 34) }] };
  assert.equal("16 GiB", valueText(memory, seriesOf(memory)[0], 3, true));
});

test("labels of ticks are not rounded", () => {
  assert.deepEqual(["1.75e-4", "0.005", "625 k", "2.5", "0"], [1.75e-4, 0.005, 625000, 2.5, 0].map(tickLabel));
});

test("labels on the axis of arrival are raw steps", () => {
  assert.deepEqual(["30", "10", "20", "30"], line.x.map((x) => placeLabel(curve, x, 3)));
  assert.deepEqual([0, 2, 3], stepSplits(curve, [0, 3], 4));
});

test("the range is everything, or the bulk on request", () => {
  assert.deepEqual([0.94, 2.06], valueRange(curve, { log: false, cut: true, zero: false }));
  assert.deepEqual(["0.82", "4.18"], valueRange(curve, { log: false, cut: false, zero: false }).map((one) => one.toFixed(2)));
  assert.equal(0, valueRange(curve, { log: false, cut: false, zero: true })[0]);
  assert.deepEqual([0.1 / 1.3, 13], valueRange({ ...curve, lines: [] }, { log: true, cut: false, zero: false }));
});

test("the range contains the lowest and highest rank unless it is cut", () => {
  const ranks = { ...curve, lines: [{ ...line, low: [-2, null, 1, 1], high: [4, null, 9, 1] }] };
  const [whole, log, cut] = [{ log: false, cut: false }, { log: true, cut: false }, { log: false, cut: true }].map((one) => valueRange(ranks, { ...one, zero: false }));
  assert.deepEqual([true, true, true, true], [whole[0] < -2, whole[1] > 9, log[0] > 0, log[1] > 9]);
  assert.ok(cut[1] < 4);
  const [first] = ranks.lines; // several lines are drawn without bands
  assert.ok(valueRange({ ...ranks, lines: [first, first] }, { log: false, cut: false, zero: false })[1] < 5);
});

test("the range of a difference has zero", () => {
  const range = valueRange({ ...curve, bulk: [-3, -1] }, { log: false, cut: true, zero: true });
  assert.deepEqual([true, true], [range[0] < -3, range[1] >= 0]);
});

test("a restart alone gives no label to a heat map", () => {
  assert.deepEqual([0, 1, 2, 3, 5], roundSteps([100, 150, 200, 250, 155, 200], 3));
});

test("the nearest value is found", () => assert.deepEqual([0, 1, 3], [-5, 1.4, 9].map((x) => nearest([0, 1, 2, 3], x))));

test("live rows remain in their places and new ones come first", () => {
  assert.deepEqual(["c", "b", "a"], keptOrder(["b", "gone", "a"], ["a", "c", "b"]));
});

test("the scale has the colours of viridis at its ends", () => {
  assert.deepEqual([[68, 1, 84], [253, 231, 37]], [viridis(-1), viridis(2)]);
});

const kept = { ...curve, axis: "step", lines: [{ label: null, x: [1, 2, 3, 4], step: null, value: [4, null, 2, 1], smoothed: [4, null, 3, 2], low: null, high: [5, null, 2, 1] }] };

test("a curve of a report has the columns that it leaves out", () => {
  const [whole, raw] = [true, false].map((isSmooth) => expanded(kept, isSmooth).lines[0]);
  assert.deepEqual([[1, 2, 3, 4], [4, null, 2, 1], [5, null, 2, 1]], [whole.step, whole.low, whole.high]);
  assert.deepEqual([[4, null, 3, 2], [null, null, null, null]], [whole.smoothed, raw.smoothed]);
});

test("a zoom window of a report has a point on each side and the range of its values", () => {
  const whole = expanded(kept, true);
  assert.equal(whole, sliced(whole, { from: null, to: null }));
  const part = sliced(whole, { from: 2.5, to: 3.5 });
  assert.deepEqual([[2, 3, 4], [1, 2]], [part.lines[0].x, part.bulk]);
  assert.match(part.notice, /^2 points of the report in this window/);
  assert.deepEqual([[[4]], null], [sliced(whole, { from: 8, to: 9 }).lines.map((one) => one.x), sliced(whole, { from: 1.9, to: 1.95 }).bulk && null]);
});

test("a curve of a report is saved as CSV", () => {
  assert.deepEqual(["line,step,step,loss,smoothed,lowest,highest", "0,1,1,4,4,4,5", "0,2,2,,,,"], csv(expanded(kept, true)).split("\n").slice(0, 3));
});

for (const smooth of ["none", "ema", "average", "both"]) {
  test(`a curve that grows equals the one made at once: ${smooth}`, () => {
    const state = { ...readState(`smooth=${smooth}`), strength: smooth === "ema" ? 0.5 : 2 };
    const stored = { ...curve, axis: "step", attempt: 0, lines: [{ label: null, x: [1, 2], step: [1, 2], value: [4, 3], smoothed: [4, 3], low: [4, 3], high: [4, 3] }], extent: [1, 2] };
    const rows = [2.5, null, null, 2].map((one, at) => [0, 3 + at, 1e9 + at, { loss: [one, one, one] }]);
    let made = grown(undefined, stored, [], state);
    for (let count = 1; count <= rows.length; count += 1) made = grown(made, stored, rows.slice(0, count), state);
    assert.deepEqual(extended(stored, rows, state), made.shown);
    assert.deepEqual([1, 2], stored.lines[0].x);

    const replaced = [...rows.slice(0, 2), [0, 5, 1e9, { loss: [9, 9, 9] }]];
    assert.deepEqual(extended(stored, replaced, state), grown(made, stored, replaced, state).shown);
  });
}

test("a range of NaN that began before the first live row remains, and grows", () => {
  const stored = { ...curve, axis: "step", attempt: 0, nonfinite: [[40, 100, "NaN 40–100"]], lines: [{ label: null, x: [38, 39], step: [38, 39], value: [4, 3], smoothed: [4, 3], low: [4, 3], high: [4, 3] }], extent: [38, 100] };
  const rows = [...Array(30).keys()].map((at) => [0, 90 + at, 1e9 + at, { loss: [null, null, null] }]);
  assert.deepEqual([[40, 119, "NaN 40–119"]], extended(stored, rows, readState("")).nonfinite);
  rows.push([0, 120, 1e9, { loss: [2, 2, 2] }], [0, 121, 1e9, { loss: [null, null, null] }]);
  assert.deepEqual([[40, 119, "NaN 40–119"], [121, 121, "NaN 121"]], extended(stored, rows, readState("")).nonfinite);
});

test("time left follows the live rows, and a change below a value is that of the server", () => {
  const rows = [...Array(40).keys()].map((at) => [0, 100 + at, 1e9 + 2 * at + (at > 20 ? 60 : 0), { loss: [4 - at / 10, 0, 0, 2], step_seconds: [at < 30 ? 1 : 2] }]);
  const line = (name, before, own = rows) => contextOf(name, own, before, 2, 99);
  assert.deepEqual([122, NaN], [secondsLeft(rows, 200), secondsLeft(rows.slice(0, 1), 200)]); // one pause does not change the pace
  assert.deepEqual(["2 min 2 s", "9.5 s", "3 h", "31 s"], [122, 9.5, 10_800, 31.2].map(duration));
  const median = "median of 5 rows: 2 to 37 in 100 rows";
  assert.deepEqual([median, "", "", "median, newest 20 steps", ""], [line("loss", median), line("loss", "last finite 3 at step 9"), line("loss", "1 of 2 ranks"), line("step_seconds", "median, newest 20 steps"), line("step_seconds", "up to step 9")]);
  assert.deepEqual(["up to step 99", ""], [99, -1].map((at) => contextOf("grad_norm", rows, "median 1 in 9 rows", 2, at)));

  rows.push([0, 140, 1e9 + 200, { loss: [null, null, null] }]);
  assert.equal("last finite 0.1000 at step 139", line("loss", median));
  assert.deepEqual(["last finite 3 at step 9", ""], ["last finite 3 at step 9", median].map((before) => line("loss", before, rows.slice(-1))));

  rows.push([0, 141, 1e9 + 202, { loss: [3, 3, 3, 1] }]);
  assert.deepEqual(["1 of 2 ranks", "1 of 2 ranks", ""], [line("loss", ""), ranksNote(rows.slice(-1), 2), ranksNote(rows.slice(-1), 1)]);

  rows.push([0, 151, 1e9 + 210, { step_seconds: [1] }], [0, 152, 1e9 + 211, { step_seconds: [1] }]);
  const every = rows.filter((row, at) => at % 10 === 0 || !row[3].loss);
  assert.deepEqual(["no loss since step 141", "last finite 1.000 at step 130"], [line("loss", ""), line("loss", "", every)]);
  assert.equal("no loss since step 9", line("loss", "no loss since step 9", rows.slice(-1)));
});

test("a line that ends with NaN has that range at its end, also of several runs and before a training loss", () => {
  const line = (label, role, last) => ({ label, role, x: [0, last], step: [0, last], value: [2, 1], smoothed: [null, null], low: [2, 1], high: [2, 1] });
  const ends = (lines, nonfinite) => seriesOf({ ...curve, lines, nonfinite }).map((one) => badRange({ ...curve, lines, nonfinite }, one, null)?.[2]);
  assert.deepEqual([undefined, "NaN of B 6–9"], ends([line("A", null, 12), line("B", null, 5)], [[2, 3, "NaN of A 2–3"], [6, 9, "NaN of B 6–9"]]));
  assert.deepEqual([undefined, "NaN 6–9"], ends([line("training", "training", 9), line(null, null, 5)], [[6, 9, "NaN 6–9"]]));
});

test("a legend shows NaN where a reader points at a range of NaN, the value of a row within a long range, and no value after the end", () => {
  const line = (label, x) => ({ label, role: null, x, step: x, value: x.map((one) => one / 2), smoothed: [null], low: [0], high: [0] });
  const drawn = { ...curve, lines: [line("A", [1, 7, 9]), line("B", [1, 8, 30])], nonfinite: [[6, 12, "NaN of B 6–12"]] };
  const texts = (x, isPointed) => seriesOf(drawn).map((one) => valueText(drawn, one, x, isPointed));
  assert.deepEqual(["3.500", "NaN"], texts(7, true));
  assert.deepEqual(["3.500", "4.000"], texts(8, true));
  assert.deepEqual(["4.500", "15.00"], texts(30, false));
  assert.deepEqual(["–", "15.00"], texts(30, true)); // A has ended
  assert.deepEqual(["4.500", "NaN"], texts(11, true)); // less than the distance of its rows after its last one
});

test("a value between gaps, such as the only one of an attempt, is drawn as a point", () => {
  assert.deepEqual([[3], [0, 4], null], [[1, 2, null, 3], [1, undefined, null, null, 5, undefined], [1, undefined, 2]].map(alone));
});

test("the axis of a perplexity ends at e^20, also if a value is near the largest number", () => {
  const range = (values) => perplexityRange({ ...curve, lines: [{ ...line, value: values }] });
  assert.equal(null, range([7, null, 2e8]));
  assert.deepEqual([7 / 1.3, Math.exp(20)], range([7, 60, Math.exp(50), 9]));
  assert.deepEqual([7 / 1.3, Math.exp(20)], range([7, 60, 1.7e308]));
  assert.deepEqual([1e12 / 1.3, 10 * (1e12 / 1.3)], range([1e12, 1e13]));
});

test("averages of live rows begin with the first value, and have no bias to it", () => {
  const stored = { ...curve, axis: "step", attempt: 0, lines: [{ label: null, x: [1], step: [1], value: [4], smoothed: [4], low: [4], high: [4] }], extent: [1, 1], restarts: [] };
  const rows = [2, 0].map((one, at) => [0, 2 + at, 1e9 + at, { loss: [one, one, one] }]);
  const found = (smooth, strength) => extended(stored, rows, { ...readState(`smooth=${smooth}`), strength }).lines[0].smoothed.map((one) => one.toFixed(4));
  assert.deepEqual(["4.0000", "2.6667", "1.1429"], found("ema", 0.5));
  assert.deepEqual(["4.0000", "3.4737", "2.4036"], found("both", 2));
});

test("a logarithmic axis has labels at decades, whatever its range", () => {
  assert.deepEqual([1e3, 1e5, 1e7, 1e9], logTicks([40, 2.6e9]));
  assert.deepEqual([0.5, 1, 2], logTicks([0.31, 3]));
});

test("values have the strong colour and their average the light one", () => {
  const found = seriesOf({ ...curve, lines: [line] }).filter((one) => one.style !== "edge");
  assert.deepEqual([["raw", "s1"], ["main", "raw"]], found.map((one) => [one.style, one.colour]));
});

test("the training loss is behind the evaluations, with a name", () => {
  const behind = { ...line, label: "training loss", role: "training" };
  const own = { ...line, smoothed: line.value.map(() => null), high: line.value, low: line.value };
  const found = seriesOf({ ...curve, name: "eval_loss", lines: [behind, own] });
  assert.deepEqual([["behind", "training loss"], ["raw", "evaluation"]], found.map((one) => [one.style, one.label]));
});

test("names at a heat map keep what distinguishes them", () => {
  const names = [0, 1].flatMap((layer) => ["qkv", "output"].map((leaf) => `module.transformer.blocks.${layer}.attention.${leaf}.weight`));
  const [start, end] = common(names);
  const context = { measureText: (/** @type {string} */ text) => ({ width: text.length }) };
  const shown = (width) => names.map((name) => clipped(context, name.slice(start, name.length - end), width));
  assert.deepEqual(["0.attention.qkv", "0.attention.output", "1.attention.qkv", "1.attention.output"], shown(20));
  assert.deepEqual(["0.att.qkv", "0.att.output", "1.att.qkv", "1.att.output"], shown(12));
  assert.deepEqual([0, 0], common(["weight"]));
});
