"""Series of ranks (tensors, features, scalars, steps) with the names and labels of a rank's `/metrics` page.

The series are created from columns. Exports of a run have additional labels, so that no two series are equal. Labels
that `/metrics` does not have are omitted here: placement, shard group, and the unit of a scalar. Rows that `/metrics`
never shows (other micro-batches, calls, virtual stages) have an additional label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.files.sorting import sort_order
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.names import STAGE_EXTRAS, Scalar
from rankscope_storage.prometheus.query import IDENTITY, NAME, Matcher, SeriesQuery
from rankscope_storage.prometheus.series import ResultLimit, Series, gathered, labelled, split_series

_MOMENTS: Final = ("vpp_stage", "micro_step", "call_seq")
"""Integer columns that distinguish rows of one tensor at one step. A column that is null in a row adds no label."""

_TENSOR: Final = """CASE WHEN "index" IS NULL THEN tensor ELSE tensor || '[' || "index" || ']' END"""
_PART: Final = re.compile(r"(.*)\[(0|[1-9][0-9]{0,8})\]", re.DOTALL)
_COUNTABLE: Final = "(value >= 0 AND NOT isnan(value))"
_RANKED: Final = ("tensor_stats", "scalars")
_NEWEST: Final = "(ts, attempt, step)"
_ALL, _COUNTED, _REST = range(3)
_MATCHED_IN_SQL: Final = (*IDENTITY, *STAGE_EXTRAS, "job")

_Shown = tuple[Scalar, int, dict[str, str]]
"""A scalar, the part of its values that a series contains, and the labels of this series.

The part is all values, the values that a counter may have (0 or more), or all others."""


@dataclass(frozen=True, slots=True)
class RankSeries:
    """Execution of a query over the rows that ranks sent."""

    connection: Connection
    question: SeriesQuery
    limit: ResultLimit

    def read(self) -> Iterator[Series]:
        """Yield the series of ranks that the query selects.

        Raises LimitError if they have too many series or samples.
        """
        if not self.question.is_of_ranks():
            return
        yield from self._tensors(catalogue.TENSOR_VALUE, names.VALUE_OPS_SHOWN, "")
        yield from self._tensors(catalogue.TENSOR_BASELINE, names.BASELINES_SHOWN, names.BASELINE_SUFFIX)
        yield from self._features()
        yield from self._steps()
        yield from self._kind_steps()
        yield from self._scalars()

    def _tensors(self, spec: MetricSpec, ops: Sequence[str], suffix: str) -> Iterator[Series]:
        wanted = [op for op in ops if self.question.fits("op", op)]
        labels = {"kind": "kind", "tensor": _TENSOR, "op": "op", **{name: _extra(name) for name in _MOMENTS}}
        if not wanted or not self._can_be(spec, labels):
            return
        judged = {name: expression for name, expression in labels.items() if name != "op"}
        values = [sql_identifier(op + suffix) for op in wanted]
        named = f"unnest([{', '.join(map(sql_string, wanted))}]) AS op"
        keys = ("run", "rank", '"index"', *map(sql_identifier, judged))
        rows = self._rows("tensor_stats", keys, values, self._where(judged), named)
        yield from self._series(spec.name, rows, labels, "value")

    def _features(self) -> Iterator[Series]:
        labels = {"kind": "kind", "module": "module", "op": "op"}
        wanted = [op for op in ("min", "max") if self.question.fits("op", op)]
        if not wanted or not self._can_be(catalogue.FEATURE_VALUE, labels):
            return
        columns = "run, rank, attempt, step, ts, kind, module"
        rows = (
            f"SELECT {columns}, unnest([{', '.join(map(sql_string, wanted))}]) AS op, "
            f"unnest([{', '.join(f'{op}(value)::DOUBLE' for op in wanted)}]) AS value "
            f"FROM {self.question.source(self.connection, 'features')} "
            f"WHERE {self._where({'kind': 'kind', 'module': 'module'})} GROUP BY {columns}"
        )
        yield from self._series(catalogue.FEATURE_VALUE.name, rows, labels, "value")

    def _steps(self) -> Iterator[Series]:
        if not self._can_be(catalogue.STEP, ()):
            return
        moments = " UNION ".join(
            self._rows(name, ("run", "rank"), ["step"], self.question.of_rank()) for name in _RANKED
        )
        yield from self._series(catalogue.STEP.name, moments, {}, "value")

    def _kind_steps(self) -> Iterator[Series]:
        labels = {"kind": "kind"}
        if not self._can_be(catalogue.KIND_STEP, labels):
            return
        rows = self._rows("tensor_stats", ("run", "rank", "kind"), ["step"], self._where(labels))
        yield from self._series(catalogue.KIND_STEP.name, f"SELECT DISTINCT * FROM ({rows})", labels, "value")

    def _scalars(self) -> Iterator[Series]:
        asked = [spec for spec in (*catalogue.SCALARS_WITH_OWN_METRIC.values(), catalogue.SCALAR) if self._is_of(spec)]
        if not asked:
            return
        stages = {name: _extra(name) for name in STAGE_EXTRAS}
        where = self._where(stages)
        if catalogue.SCALAR not in asked:
            own = [name for name, spec in catalogue.SCALARS_WITH_OWN_METRIC.items() if spec in asked]
            where += f" AND name IN ({', '.join(map(sql_string, own))})"
        keys = ("run", "rank", "name", "unit", "labels", *STAGE_EXTRAS)
        source = self._rows("scalars", (*keys, _COUNTABLE), ["value"], where)
        found = self.connection.query(f"SELECT DISTINCT name, unit, labels FROM ({source})").to_pylist()
        chosen = self._distinguished(one for row in found for one in self._of_scalar(Scalar(**row)))
        if not chosen:
            return
        places = {labelled(labels): place for place, (_, _, labels) in enumerate(chosen)}
        listed = ", ".join(
            f"({places[labelled(labels)]}, {_text(scalar.name)}, {_text(scalar.unit)}, {_text(scalar.labels)}, {part})"
            for scalar, part, labels in chosen
        )
        rows = (
            f"SELECT * FROM ({source}) AS row "
            f"JOIN (VALUES {listed}) AS chosen(place, c_name, c_unit, c_labels, c_part) ON name = c_name "
            "AND unit IS NOT DISTINCT FROM c_unit AND labels IS NOT DISTINCT FROM c_labels "
            f"AND CASE c_part WHEN {_COUNTED} THEN {_COUNTABLE} WHEN {_REST} THEN NOT {_COUNTABLE} ELSE true END"
        )
        labels = {"place": "place::VARCHAR", **stages}
        for series in self._series("", rows, labels, "value"):
            here = dict(series.labels)
            shown = chosen[int(here.pop("place"))][2]
            yield Series(labelled({**here, **shown}), series.times_ms, series.values)

    def _distinguished(self, scalars: Iterable[_Shown]) -> list[_Shown]:
        """Return the scalars with labels that satisfy the matchers of the query.

        The label `unit` is removed unless two scalars differ only in their unit.
        """
        seen: set[tuple[tuple[str, str], ...]] = set()
        kept = []
        for scalar, part, labels in sorted(scalars, key=lambda shown: shown[2].get("unit", "")):
            plain = {name: text for name, text in labels.items() if name != "unit"}
            own = labels if labelled(plain) in seen else plain
            seen.add(labelled(own))
            kept += [(scalar, part, own)] if self.question.fits_all(own, _MATCHED_IN_SQL) else []
        return kept

    def _of_scalar(self, scalar: Scalar) -> Iterator[_Shown]:
        """Yield each part of a scalar's values with its metric and labels.

        A scalar has two parts if its metric is a counter: values that a counter may have (0 or more), and other values,
        which are samples of rankscope_scalar.
        """
        own = names.own_metric(scalar)
        shown: list[tuple[int, MetricSpec, MetricSpec | None]] = []
        if own is None:
            shown.append((_ALL, catalogue.SCALAR, None))
        else:
            shown.append((_COUNTED if own.type == "counter" else _ALL, own, own))
            shown += [(_REST, catalogue.SCALAR, None)] if own.type == "counter" else []
        for part, spec, as_own in shown:
            labels = {NAME: spec.name, **names.scalar_labels(scalar, as_own)}
            if spec is catalogue.RULE_SCORE:
                labels.pop("tensor", None)  # the scores of a rule are one series, as on the page of a rank
            yield scalar, part, labels

    def _series(self, metric: str, rows: str, labels: Mapping[str, str], value: str) -> Iterator[Series]:
        every = {"run": IDENTITY["run"], "rank": IDENTITY["rank"], **labels}
        columns = ", ".join(f"{expression} AS {sql_identifier(name)}" for name, expression in every.items())
        query = (
            f"SELECT {columns}, epoch_ms(ts) AS ms, {value} AS value, attempt, step AS step_ FROM ({rows}) "
            f"WHERE ({value}) IS NOT NULL"
        )
        found = gathered(self.connection.stream(self._as_asked(query, every)), self.limit)
        if found is None:
            return
        # Sorted here by dictionary codes: for large results, sorting by text in DuckDB takes twice as long.
        found = found.take(pa.array(sort_order(found, (*every, "ms", "attempt", "step_"))))
        ends = self.question.ends(self.connection)
        for own, times, values in split_series(found, list(every), self.limit):
            texts = {name: str(text) for name, text in own.items()}
            instance = f"{texts['run']}/{texts['rank']}"
            series = Series(labelled({NAME: metric, "job": names.JOB, "instance": instance, **texts}), times, values)
            yield series.ended(ends.get(texts["run"], ()))

    def _rows(self, dataset: str, keys: Sequence[str], values: Sequence[str], where: str, more: str = "") -> str:
        """Return a query for the rows of `dataset` with the columns `keys`, and one row for each column in `values`.

        `more` is an additional column of the result. If the query needs only some samples of each combination of keys,
        there are no others. The labels of series, which are texts, are then computed for few rows.
        """
        question = self.question
        source = f"FROM {question.source(self.connection, dataset)} WHERE {where}"
        columns = ", ".join([*keys, *([more] if more else [])])
        if not (question.series_alone or question.last_alone or question.largest_alone or question.step_ms):
            each = _each(f"{value}::DOUBLE" for value in values)
            return f"SELECT {columns}, attempt, step, ts, {each} AS value {source}"
        order = "CASE WHEN isnan({0}::DOUBLE) THEN '-inf'::DOUBLE ELSE {0} END" if question.largest_alone else _NEWEST
        time = f"arg_max(ts, {order})" if question.largest_alone else "max(ts)"
        times = _each(f"{time.format(value)} FILTER ({value} IS NOT NULL)" for value in values)
        found = _each(f"arg_max({value}, {order.format(value)})::DOUBLE" for value in values)
        period = [f"(epoch_ms(ts) + {question.step_ms - 1}) // {question.step_ms}"] if question.step_ms else []
        return (
            f"SELECT {columns}, max(attempt) AS attempt, max(step) AS step, {times} AS ts, {found} AS value "
            f"{source} GROUP BY {', '.join([*keys, *period])}"
        )

    def _as_asked(self, query: str, labels: Mapping[str, str]) -> str:
        """Return `query`, or with `series_alone` a query for the last row of each series.

        The last rows are few, so that a long time range does not exceed the limits.
        """
        if not self.question.series_alone:
            return query
        names = ", ".join(map(sql_identifier, labels))
        last = "arg_max(value, ms) AS value, max(attempt) AS attempt, max(step_) AS step_"
        return f"SELECT {names}, max(ms) AS ms, {last} FROM ({query}) GROUP BY {names}"

    def _where(self, labels: Mapping[str, str]) -> str:
        predicates = [self.question.of_rank()]
        for matcher in self.question.matchers:
            if matcher.name in _MOMENTS and matcher.name in labels:
                predicates.append(matcher.on_number(matcher.name))
            elif matcher.name == "tensor" and "tensor" in labels:
                predicates.append(_of_tensor(matcher))
            elif matcher.name in labels:
                predicates.append(matcher.on_text(labels[matcher.name]))
        return " AND ".join(predicates)

    def _can_be(self, spec: MetricSpec, labels: Mapping[str, str] | Sequence[str]) -> bool:
        """Return whether series of the metric `spec` can satisfy the matchers of the query.

        `labels` are the names of labels that these series may have. Any other label counts as empty.
        """
        return self._is_of(spec) and self.question.fits_all({}, (NAME, "job", *IDENTITY, *labels))

    def _is_of(self, spec: MetricSpec) -> bool:
        return self.question.is_of(spec.name)


def _each(expressions: Iterable[str]) -> str:
    """Return an SQL expression with one row for each of the `expressions`."""
    several = list(expressions)
    return several[0] if len(several) == 1 else f"unnest([{', '.join(several)}])"


def _extra(name: str) -> str:
    """Return the SQL expression for the label with the text of column `name`; the text is empty for a null."""
    return f"coalesce({name}::VARCHAR, '')"


def _of_tensor(matcher: Matcher) -> str:
    """Return the SQL predicate for the name of a tensor, which ends with its index in brackets.

    If the matcher has plain values, the predicate compares the columns `tensor` and `index`.
    """
    values = matcher.alternatives()
    if values is None:
        return matcher.on_text(f"({_TENSOR})")
    predicates = []
    for value in values:
        predicates.append(f'(tensor = {sql_string(value)} AND "index" IS NULL)')
        if part := _PART.fullmatch(value):
            predicates.append(f'(tensor = {sql_string(part[1])} AND "index" = {part[2]})')
    return f"({' OR '.join(predicates)})"


def _text(value: str | None) -> str:
    return "NULL::VARCHAR" if value is None else sql_string(value)
