"""Evaluates score rules, one step after the other: on ranks, in the service, for imports and for replay.

The state of the words, such as the level of a series, is kept here by the text of the expression. Arrays have an
element for each tensor; those of rules between ranks are [ranks, tensors]. They follow a changed plan by the names of
the tensors, and other ranks by their numbers. All numbers are float64.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules.expression import GRADIENT, Node
from rankscope_contract.rules.score import CONDITIONS, ScoreRule, kinds_named

Values = npt.NDArray[np.float64]
Value = Any  # a float, or `Values`

FIRST_VERDICT: Final = 60
"""Number of values of a series from which a level is known."""
_UNCUT: Final = 20  # values at the beginning that move a level without a limit
_CUT: Final = 3.0  # in usual deviations: larger deviations move a level as these do
MOST_FIRINGS: Final = 64


@dataclass(frozen=True, eq=False)
class Layout:
    """The tensors of a plan, and the column of each of their statistics. A layout is compared by its identity."""

    tensors: tuple[Any, ...]
    """A key for each tensor: its name, and further fields that distinguish equal names."""
    columns: Mapping[str, npt.NDArray[np.int64]]
    """By kind: the column of each tensor in the table of statistics, -1 without one."""
    ranks: tuple[int, ...] = ()
    """For rules between ranks: the ranks, one for each row of the table of statistics."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.ranks), len(self.tensors)) if self.ranks else (len(self.tensors),)

    def __post_init__(self) -> None:
        selections = {}
        for kind, columns in self.columns.items():
            first, count = (int(columns[0]), len(columns)) if len(columns) else (0, 0)
            is_slice = first >= 0 and np.array_equal(columns, np.arange(first, first + count))
            selections[kind] = slice(first, first + count) if is_slice else columns
        object.__setattr__(self, "_selections", selections)
        object.__setattr__(self, "_absent", {kind: columns < 0 for kind, columns in self.columns.items()})

    def select(self, kind: str, row: Values) -> Values:
        """Return the values of `kind` in `row`, which has a value for each column; NaN for a tensor without one."""
        selection = self._selections.get(kind)  # type: ignore[attr-defined]
        if selection is None:
            return np.full(len(self.tensors), math.nan)
        if isinstance(selection, slice):
            return row[..., selection]
        return np.where(self._absent[kind], math.nan, row[..., selection])  # type: ignore[attr-defined]


NO_TENSORS: Final = Layout((), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The numbers of one step that the rules read."""

    rows: Mapping[str, Values] = field(default_factory=dict)
    """By op: a value for each column of the table of statistics, NaN where there is none."""
    layout: Layout = NO_TENSORS
    scalars: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Values] = field(default_factory=dict)
    """By name, such as `beta1`: a value for each tensor."""
    facts: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """By name, those of CONDITIONS: whether each tensor has it."""
    follows: bool = True
    """True if the frame before is that of the step before, and nothing but the optimizer has changed the state."""


class ScoreFiring(NamedTuple):
    """A rule that fires. `tensor` is a position in the layout; None for a rule that is judged once per step."""

    rule: ScoreRule
    tensor: int | None
    score: float


class ScoreVerdict(NamedTuple):
    """The result of one step: the firings, and for each judged rule the largest score with its tensor.

    A firing that continues an earlier one, by the latch of its rule, is left out.
    """

    firings: list[ScoreFiring]
    largest: list[ScoreFiring]


class _Moving:
    """A robust moving level and usual deviation of one series or of arrays of series."""

    def __init__(self) -> None:
        self.level: Value = math.nan
        self.usual: Value = math.nan
        self.count: Value = 0.0

    def move(self, x: Value, rate: float) -> tuple[Value, Value]:
        """Add `x`. Return its deviation from the level before, and the usual deviation before; NaN without them."""
        if isinstance(x, float):
            return self._move_number(x, rate)
        seen = np.isfinite(x)
        count = self.count if isinstance(self.count, np.ndarray) else np.zeros(np.shape(x))
        known = count > 0
        level, usual = np.where(known, self.level, x), np.where(known, self.usual, 0.0)
        share = np.maximum(1.0 / (count + 1.0), rate)
        deviation = x - level
        size = np.abs(deviation)
        limit = np.where(count < _UNCUT, math.inf, _CUT * usual)
        size = np.minimum(size, limit)
        self.level = np.where(seen, level + share * np.copysign(size, deviation), self.level)
        self.usual = np.where(seen, usual + share * (size - usual), self.usual)
        self.count = count + seen
        is_early = count < FIRST_VERDICT
        return np.where(is_early, math.nan, deviation), np.where(is_early, math.nan, usual)

    def _move_number(self, x: float, rate: float) -> tuple[float, float]:
        if not math.isfinite(x):
            return math.nan, math.nan
        count = self.count
        level, usual = (self.level, self.usual) if count else (x, 0.0)
        share = max(1.0 / (count + 1.0), rate)
        deviation = x - level
        size = abs(deviation) if count < _UNCUT else min(abs(deviation), _CUT * usual)
        self.level = level + share * math.copysign(size, deviation)
        self.usual = usual + share * (size - usual)
        self.count = count + 1.0
        return (math.nan, math.nan) if count < FIRST_VERDICT else (deviation, usual)


class Operation(NamedTuple):
    """A part of an expression. Its value is `function(*values)`, with the values of `arguments` by their source.

    With a `key`, which names its state or statistic, it is `function(evaluator, key, *values, *constants)`.
    """

    source: str
    function: Callable[..., Value]
    arguments: tuple[str, ...]
    key: Any
    constants: tuple[float, ...]
    reads_tensors: bool


class ScoreEvaluator:
    """Evaluates `rules` for the frames of one rank, in their order."""

    def __init__(
        self,
        rules: Iterable[ScoreRule],
        tell: Callable[[str], None] | None = None,
        most_firings: int | None = MOST_FIRINGS,
    ) -> None:
        """Use `rules`. If a rule is not judged, `tell` is called once with each reason."""
        self.rules = tuple(rules)
        self._most_firings = most_firings
        self._tell = tell
        self._named: set[tuple[str, str]] = set()
        program: dict[str, Operation | float] = {}
        self._results = [_compile(rule.tree, program) for rule in self.rules]
        self._constants = {source: one for source, one in program.items() if isinstance(one, float)}
        self._operations = [one for one in program.values() if isinstance(one, Operation)]
        self._of_tensors = [rule.is_of_tensors for rule in self.rules]
        self._reads_tensors = [_reads_tensors(program[source]) for source in self._results]
        self._held: list[Value] = [None] * len(self.rules)
        self.state: dict[str, Any] = {}
        self.memo: dict[str, Value] = {}
        self.frame = Frame()
        self.count = self.measured = 0  # frames, and those of them with statistics
        self._layout = NO_TENSORS

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of an evaluator of logged numbers, which an import stores for the next one."""
        return {"rules": self.rules, "state": self.state, "held": self._held, "count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rules"])  # type: ignore[misc]
        self.state, self._held, self.count = state["state"], state["held"], state["count"]

    def observe(self, frame: Frame) -> ScoreVerdict:
        """Evaluate the rules for the next step. At most `most_firings` are returned, the largest of each rule first."""
        if frame.rows and frame.layout is not self._layout:
            self._follow(self._layout, frame.layout)
            self._layout = frame.layout
        self.frame, self.memo = frame, dict(self._constants)
        self.count += 1
        self.measured += bool(frame.rows)
        firings: list[ScoreFiring] = []
        largest: list[ScoreFiring] = []
        with np.errstate(all="ignore"):
            self._compute(has_rows=bool(frame.rows))
            for place, rule in enumerate(self.rules):
                if self._reads_tensors[place] and not frame.rows:
                    continue  # a record of logged numbers alone
                scores = self.memo[self._results[place]]
                if self._of_tensors[place]:
                    self._judge_tensors(place, rule, np.broadcast_to(scores, frame.layout.shape), firings, largest)
                else:
                    self._judge(place, rule, float(scores), firings, largest)
        return ScoreVerdict(firings[: self._most_firings], largest)

    def _compute(self, *, has_rows: bool) -> None:
        """Compute all parts of the expressions, also before the first verdict of a rule, for the state of its words."""
        memo = self.memo
        for source, function, arguments, key, constants, reads_tensors in self._operations:
            if reads_tensors and not has_rows:
                continue
            values = [memo[argument] for argument in arguments]
            memo[source] = function(*values) if key is None else function(self, key, *values, *constants)

    def _judge(self, place: int, rule: ScoreRule, score: float, firings: list[Any], largest: list[Any]) -> None:
        seen = self.measured if self._reads_tensors[place] else self.count
        if math.isnan(score) or seen <= rule.after_steps:
            return
        found = ScoreFiring(rule, None, score)
        largest.append(found)
        held = rule.latch if self._held[place] is None else self._held[place]
        self._held[place] = held + 1 if score <= rule.above else 0
        if score > rule.above and held >= rule.latch:
            firings.append(found)

    def _judge_tensors(self, place: int, rule: ScoreRule, scores: Values, firings: Any, largest: Any) -> None:
        for name in rule.holds_for:
            scores = self._where_it_holds(rule, name, scores)
        judged = ~np.isnan(scores)
        if self.measured <= rule.after_steps or not judged.any():
            return

        def firing(at: int) -> ScoreFiring:
            return ScoreFiring(rule, at % scores.shape[-1], float(scores.flat[at]))

        largest.append(firing(int(np.argmax(np.where(judged, scores, -math.inf)))))
        held = self._held[place]
        if held is None:
            held = np.full(scores.shape, rule.held_at_first)
        fires = scores > rule.above
        self._held[place] = np.where(fires, 0, held + judged)
        is_new = fires & (held >= rule.latch)
        if rule.scope == "ranks":
            is_new &= ~(fires & ~is_new).any(axis=0)  # it has fired for another rank
        places = np.flatnonzero(is_new)
        firings += map(firing, places[np.argsort(-scores.flat[places], kind="stable")].tolist())

    def _where_it_holds(self, rule: ScoreRule, condition: str, scores: Values) -> Values:
        holds = self.frame.facts.get(condition)
        if holds is None or holds.all():
            return scores
        concerned = ~holds & ~np.isnan(scores)
        if concerned.any() and self._tell is not None and (rule.name, condition) not in self._named:
            self._named.add((rule.name, condition))
            count = int(concerned.sum())
            self._tell(f"{rule.name} is not judged for {count} tensors: {CONDITIONS[condition]}")
        return np.where(holds, scores, math.nan)

    def _follow(self, old: Layout, new: Layout) -> None:
        """Move all state to the tensors and ranks of another layout."""
        tensors, ranks = _places(old.tensors, new.tensors), _places(old.ranks, new.ranks)

        def moved(value: Any, fresh: float) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            if value.shape[-1] == len(old.tensors):
                value = _taken(value, tensors, fresh)
            return _taken(value.T, ranks, fresh).T if value.ndim > 1 else value

        for state in self.state.values():
            if isinstance(state, _Moving):
                state.level, state.usual = moved(state.level, math.nan), moved(state.usual, math.nan)
                state.count = moved(state.count, 0.0)
            else:
                state[:] = [moved(value, math.nan) for value in state]
        for position, rule in enumerate(self.rules):
            if isinstance(self._held[position], np.ndarray):
                self._held[position] = moved(self._held[position], float(rule.held_at_first))


def _places(old: Sequence[Any], new: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return the position in `old` of each of `new`, -1 without one."""
    known = {one: position for position, one in enumerate(old)}
    return np.array([known.get(one, -1) for one in new], np.int64)


def _taken(values: Values, places: npt.NDArray[np.int64], fresh: float) -> Values:
    """Return the values at `places` of the last axis, and `fresh` for -1."""
    if not values.shape[-1]:
        return np.full((*values.shape[:-1], len(places)), fresh)
    return np.where(places >= 0, values[..., places], fresh)


def _divided(x: Value, y: Value) -> Value:
    if isinstance(x, float) and isinstance(y, float):
        return x / y if y else math.nan
    return np.true_divide(x, y)


def _log(x: Value) -> Value:
    if isinstance(x, float):
        return math.log(x) if x > 0 else math.nan
    return np.log(np.where(x > 0, x, math.nan))


def _sqrt(x: Value) -> Value:
    return (math.sqrt(x) if x >= 0 else math.nan) if isinstance(x, float) else np.sqrt(x)


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    return lambda x, y: 1.0 * compare(x, y)


def _over_tensors(x: Values) -> Value:
    return _medians(x)[:, None] if x.ndim > 1 else float(_medians(x[None])[0])


def _medians(x: Values) -> Values:
    """Return the median of each row of `x`; NaN does not count."""
    if not x.shape[1]:
        return np.full(len(x), math.nan)
    known: Values = np.sort(x, axis=1)  # NaN comes last
    count = np.count_nonzero(~np.isnan(known), axis=1)
    rows = np.arange(len(x))
    middle: Values = known[rows, (count - 1) // 2] + known[rows, count // 2]
    return middle / 2


def _over_ranks(x: Values) -> Values:
    """Return the median over the ranks, for each tensor; NaN if fewer than two ranks have it."""
    found, unlike = _common(x)
    found[unlike] = _medians(x[:, unlike].T)
    found[unlike[np.count_nonzero(~np.isnan(x[:, unlike]), axis=0) < 2]] = math.nan
    return found


def _common(x: Values) -> tuple[Values, npt.NDArray[np.int64]]:
    """Return the value that all ranks have, for each tensor, and the positions of the tensors without one."""
    found = np.maximum.reduce(x, axis=0)
    return found, np.flatnonzero(found != np.minimum.reduce(x, axis=0))


def _apart(x: Values) -> Values:
    found, unlike = _common(x)
    apart = np.abs(x[:, unlike] - _over_ranks(x[:, unlike]))
    if np.isnan(apart).all():  # the usual case takes no array of all ranks
        found = np.zeros(len(found))
        found[unlike] = math.nan
        return found
    found = np.zeros(x.shape)
    found[:, unlike] = apart
    return found


def _others(x: Values) -> Values:
    known = ~np.isnan(x)
    own = np.where(known, x, 0.0)
    count = known.sum(axis=0) - known
    return np.where(count > 0, (own.sum(axis=0) - own) / count, math.nan)


def _sum(x: Value) -> Value:
    """Return the sum of the known values, which does not depend on their order: a store has another one than a rank."""
    if np.ndim(x) > 1:
        return np.nansum(x, axis=1, keepdims=True)
    return float(np.add.reduce(np.sort(x[~np.isnan(x)]))) if np.size(x) else math.nan


def _reduced(function: Any, values: Sequence[Value]) -> Value:
    found = values[0]
    for value in values[1:]:
        found = function(found, value)
    return found if isinstance(found, np.ndarray) else float(found)


_FUNCTIONS: Final[dict[str, Callable[..., Value]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
    **{
        sign: _compared(compare)
        for sign, compare in {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}.items()
    },
    "abs": abs,
    "log": _log,
    "sqrt": _sqrt,
    "sum": _sum,
    "over_tensors": _over_tensors,
    "largest": lambda x: float(np.fmax.reduce(x, axis=None)) if np.size(x) else math.nan,
    "others": _others,
    "apart": _apart,
    "over_ranks": _over_ranks,
    "max": lambda *values: _reduced(np.fmax, values),
    "min": lambda *values: _reduced(np.fmin, values),
}
"""Words without state, as functions of values."""


def _compile(node: Node, program: dict[str, Operation | float]) -> str:
    """Add the parts of `node` to `program`, each after its arguments, and return its source. Equal parts are one."""
    name, given = node.name, node.arguments
    if name == "number":
        program[node.source] = float(node.value)
        return node.source
    if name == "scalar":
        program[node.source] = Operation(node.source, _scalar, (), str(given[0].value), (), reads_tensors=False)
        return node.source
    if not given:
        function, key = (_statistic, tuple(name.split("."))) if "." in name else (_setting, name)
        program[name] = Operation(name, function, (), key, (), reads_tensors=True)
        return name
    inner = tuple(_compile(one, program) for one in given)
    source, reads = f"{name}({','.join(inner)})", any(_reads_tensors(program[one]) for one in inner)
    if name in _STATEFUL or name in _LEVELS:
        word = "moving" if name in _LEVELS else name  # the words about a level of the same value share its state
        key, constants = f"{word}({','.join(inner)})", tuple(float(one.value) for one in given[:-1])
        program.setdefault(key, Operation(key, _STATEFUL[word], inner[-1:], key, constants, reads))
        inner = (key,)
    if name not in _STATEFUL:
        function = _LEVELS.get(name) or _FUNCTIONS[name]
        program.setdefault(source, Operation(source, function, inner, None, (), reads))
    return source


def _reads_tensors(part: Operation | float) -> bool:
    return isinstance(part, Operation) and part.reads_tensors


def _scalar(evaluator: ScoreEvaluator, name: str) -> float:
    return float(evaluator.frame.scalars.get(name, math.nan))


def _setting(evaluator: ScoreEvaluator, name: str) -> Value:
    return evaluator.frame.settings.get(name, math.nan)


def _statistic(evaluator: ScoreEvaluator, names: tuple[str, str]) -> Values:
    kind, op = names
    if op != "rms":
        return _selected(evaluator.frame, kind, op)
    return _selected(evaluator.frame, kind, "norm") / np.sqrt(_selected(evaluator.frame, kind, "numel"))


def _selected(frame: Frame, kind: str, op: str) -> Values:
    layout, row = frame.layout, frame.rows[op]
    found: Values | None = None
    for one in kinds_named(kind):
        if one in layout.columns:
            own = layout.select(one, row)
            found = own if found is None else np.where(np.isnan(found), own, found)
    if found is None:
        return np.full(len(layout.tensors), math.nan)
    if kind != GRADIENT or Kind.PARAM_AFTER not in layout.columns:
        return found
    return np.where(np.isnan(layout.select(Kind.PARAM_AFTER, frame.rows["numel"])), math.nan, found)


def _last(evaluator: ScoreEvaluator, source: str, x: Value) -> Value:
    state = evaluator.state.setdefault(source, [math.nan])
    if _is_absent(x):
        return math.nan
    before, state[0] = state[0], x
    return before if evaluator.frame.follows else math.nan


def _ago(evaluator: ScoreEvaluator, source: str, x: Value, n: float) -> Value:
    values = evaluator.state.setdefault(source, [])
    if _is_absent(x):
        return math.nan
    before = values[0] if len(values) == n else math.nan
    _append(values, x, n)
    return before


def _is_absent(x: Value) -> bool:
    """Return whether a number is absent at this step: it leaves the state of a word as it is."""
    return isinstance(x, float) and math.isnan(x)


def _append(values: list[Value], x: Value, n: float) -> None:
    """Append `x`, and keep the last n values."""
    values.append(x)
    del values[: -int(n)]


def _moved(evaluator: ScoreEvaluator, source: str, x: Value, rate: float) -> tuple[Value, Value]:
    moving: _Moving = evaluator.state.setdefault(source, _Moving())
    return moving.move(x, rate)


def _held(evaluator: ScoreEvaluator, source: str, z: Value, n: float, clip: float) -> Value:
    values: list[Value] = evaluator.state.setdefault(source, [])
    if isinstance(z, float):
        if not math.isnan(z):
            _append(values, min(max(z, -clip), clip), n)
        return sum(values) / math.sqrt(n) if len(values) == n and not math.isnan(z) else math.nan
    _append(values, np.clip(z, -clip, clip), n)
    return functools.reduce(np.add, values) / math.sqrt(n) if len(values) == n else math.nan


def _newest(evaluator: ScoreEvaluator, source: str, x: Value, n: float) -> list[Value] | None:
    """Add `x`. Return the last n values; None while there are fewer, and if `x` is absent."""
    values: list[Value] = evaluator.state.setdefault(source, [])
    if _is_absent(x):
        return None
    _append(values, x, n)
    return None if len(values) < n else values


def _least(evaluator: ScoreEvaluator, source: str, x: Value, n: float) -> Value:
    if (values := _newest(evaluator, source, x, n)) is None:
        return math.nan
    return min(values) if isinstance(x, float) else np.min(values, axis=0)


def _exceeded(evaluator: ScoreEvaluator, source: str, x: Value, share: float, n: float) -> Value:
    if (values := _newest(evaluator, source, x, n)) is None:
        return math.nan
    found = np.quantile(np.array(values), 1.0 - share, axis=0)
    return found if isinstance(x, np.ndarray) else float(found)


def _lowest(evaluator: ScoreEvaluator, source: str, x: Value) -> Value:
    state = evaluator.state.setdefault(source, [math.nan])
    before = state[0]
    state[0] = np.fmin(before, x) if isinstance(x, np.ndarray) else float(np.fmin(before, x))
    return before


def _ceiling(evaluator: ScoreEvaluator, source: str, x: float, n: float, share: float) -> float:
    state = evaluator.state.setdefault(source, [math.nan, 0.0])
    highest, count = state
    if math.isnan(x):
        return math.nan
    if not x <= highest * (1 + share):
        state[:] = [x, 1.0]
    elif x >= highest * (1 - share):
        state[:] = [max(x, highest), count + 1.0]
    return highest if count >= n else math.nan


_LEVELS: Final[dict[str, Callable[..., Value]]] = {
    "level": lambda moved: _divided(*moved),
    "deviation": operator.itemgetter(0),
    "usual": operator.itemgetter(1),
}
"""Words about the deviation of a value from its level, and its usual deviation."""

_STATEFUL: Final[dict[str, Callable[..., Value]]] = {
    "moving": _moved,
    "last": _last,
    "ago": _ago,
    "held": _held,
    "least": _least,
    "exceeded": _exceeded,
    "lowest": _lowest,
    "ceiling": _ceiling,
}
"""Words with state: functions of the evaluator, the name of their state, their value, and their constants."""
