"""Which files the views of one connection show, question by question: all that can matter, and few others."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rankscope_storage.asking.definitions import named
from rankscope_storage.asking.engines import DEFINITIONS, RAW, WITHOUT_FILES, Engine, trust
from rankscope_storage.asking.questions import Mention, bounds, mentions
from rankscope_storage.asking.shortcuts import BUCKETS, CURVE, LATEST, LOSS, Shortcuts
from rankscope_storage.asking.views import common_columns, raw_select
from rankscope_storage.log.bounds import Bounds
from rankscope_storage.log.snapshot import Snapshot

_TREE: Final = "SELECT json_serialize_sql(?, skip_null := true, skip_empty := true, skip_default := true)"
_UNDERSTOOD: Final = 256
"""Statements whose reading is remembered; then it is begun anew."""


class Views:
    """The views in `engine`, as `cursor` sees them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cursor = engine.database.cursor()
        self._shortcuts = Shortcuts(engine, self.cursor)
        self.files: dict[str, Sequence[str]] = {}
        """By dataset: what its view of raw rows reads."""

    @property
    def are_complete(self) -> bool:
        """Whether every view and macro is made."""
        return len(self.engine.defined) == len(DEFINITIONS)

    def show(self, query: str, parameters: object, snapshot: Snapshot) -> bool:
        """Make what `query` names, and show it the files of `snapshot` that it needs; False if that is not known."""
        read = self._mentioned(query)
        if read is None:
            return False
        trust(self.engine, trusting=True)
        self._define(named(query, DEFINITIONS), self._wanted(read, parameters, snapshot), snapshot)
        return True

    def show_whole(self, query: str | None, snapshot: Snapshot) -> None:
        """Show all files in what `query` names, or without one in all views and macros.

        It may come to what is made already without a word of it, so that shows all files too.
        """
        trust(self.engine, trusting=False)
        needed = self.engine.defined.keys() | (DEFINITIONS if query is None else named(query, DEFINITIONS))
        self._define([name for name in DEFINITIONS if name in needed], None, snapshot)

    def _define(self, names: Iterable[str], reading: Mapping[str, Sequence[Bounds]] | None, snapshot: Snapshot) -> None:
        """Let the views and macros called `names`, which come in order of need, show the files of `reading`."""
        for name in names:
            definition = DEFINITIONS[name]
            for dataset in definition.datasets:
                self._show(dataset, None if reading is None else reading.get(dataset), snapshot)
            statement = self._statement(name, snapshot, is_understood=reading is not None)
            if statement != self.engine.defined.get(name):
                self.cursor.execute(statement)
                self.engine.defined[name] = statement

    def _statement(self, name: str, snapshot: Snapshot, *, is_understood: bool) -> str:
        """Return what makes the view or macro as it is right for the files that are shown."""
        if name in WITHOUT_FILES and not self.files[name]:
            return WITHOUT_FILES[name]
        if is_understood and name == LATEST:
            return self._shortcuts.latest()
        if is_understood and name == CURVE:
            return self._shortcuts.curve(self.files["scalars"], self.files["scalar_rollups"], snapshot)
        if is_understood and name == LOSS:
            return self._shortcuts.loss() or DEFINITIONS[name].statement
        if is_understood and name == BUCKETS:
            return self._shortcuts.buckets(self.files["tensor_stats"])
        return DEFINITIONS[name].statement

    def _show(self, dataset: str, wanted: Sequence[Bounds] | None, snapshot: Snapshot) -> None:
        """Let the view of raw rows read the files of the snapshot that hold what is `wanted`, or all."""
        files = snapshot.within(dataset, wanted)
        if files == self.files.get(dataset):
            return
        self.cursor.execute(f"SET VARIABLE {_variable(dataset)} = ?::VARCHAR[]", [files])
        self.engine.footers.update(files)
        shape = (not files, common_columns(dataset, files))
        if shape != self.engine.shapes.get(dataset):
            select = raw_select(dataset, f"getvariable('{_variable(dataset)}')", empty=shape[0], columns=shape[1])
            self.cursor.execute(f"CREATE OR REPLACE VIEW {RAW}{dataset} AS {select}")
        self.files[dataset], self.engine.shapes[dataset] = files, shape

    def _wanted(self, read: Iterable[Mention], parameters: object, snapshot: Snapshot) -> dict[str, list[Bounds]]:
        """Return by dataset the rows that the mentions of views and macros need of it, one way or another."""
        wanted: dict[str, list[Bounds]] = {}
        asked: dict[str, list[Bounds]] = {LATEST: [], CURVE: [], LOSS: []}
        for mention in read:
            needed = bounds(mention, parameters)
            for name in asked.keys() & _closure(mention.name):
                asked[name].append(needed)
            if mention.name != LATEST:
                for dataset in _datasets(mention.name):
                    wanted.setdefault(dataset, []).append(needed)
        if asked[LATEST]:
            wanted.setdefault("tensor_stats", []).extend(self._shortcuts.find_newest(asked[LATEST], snapshot))
        if asked[CURVE]:
            self._shortcuts.find_extents(asked[CURVE], snapshot)
        if asked[LOSS]:
            self._shortcuts.look_at_losses(asked[LOSS], snapshot)
        return wanted

    def _mentioned(self, query: str) -> tuple[Mention, ...] | None:
        """Return what `query` reads of our views and macros, None when it may read anything."""
        remembered = self.engine.understood
        if query not in remembered:
            if len(remembered) >= _UNDERSTOOD:
                remembered.clear()
            [(tree,)] = self.cursor.execute(_TREE, [query]).fetchall()
            remembered[query] = _read(tree)
        return remembered[query]


def _read(tree: str) -> tuple[Mention, ...] | None:
    try:
        return mentions(json.loads(tree).get("statements", ()), DEFINITIONS)
    except RecursionError:  # deeper than Python reads, though not than DuckDB does
        return None


@functools.cache
def _closure(name: str) -> frozenset[str]:
    """Return the view or macro called `name` and all that it reads, also through others."""
    return frozenset([name]).union(*map(_closure, DEFINITIONS[name].reads))


@functools.cache
def _datasets(name: str) -> frozenset[str]:
    return frozenset(dataset for read in _closure(name) for dataset in DEFINITIONS[read].datasets)


def _variable(dataset: str) -> str:
    return f"rankscope_files_{dataset}"
