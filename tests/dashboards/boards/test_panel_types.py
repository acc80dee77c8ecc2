"""The TypeScript compiler checks all boards against the types that Grafana publishes in the package `@grafana/schema`.

`make boards-check` fetches the compiler and the package with npm, in the versions that the Makefile names.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.dashboards.generated import BOARDS

from rankscope_dashboards.boards.elements.pages import all_panels

MODULES = {
    "stat": "stat/panelcfg/x/StatPanelCfg",
    "status-history": "statushistory/panelcfg/x/StatusHistoryPanelCfg",
    "table": "table/panelcfg/x/TablePanelCfg",
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg",
}
"""Modules of the package with the types `Options` and `FieldConfig`, by type of panel."""

WITH_SETTINGS = {"status-history", "table", "timeseries"}
"""Types of panels with settings of their own for each field: the type `FieldConfig`."""

BEFORE_9_5 = "custom.displayMode"
"""Setting of Grafana 9.4 for the colour of a cell, which newer releases ignore. Its newer name is next to it."""

HEADER = """
import type { AnnotationQuery, Dashboard } from '@grafana/schema';

// The package has enumerations, and a board has their values.
type Plain<T> =
  unknown extends T ? T :
  T extends string ? `${T}` :
  T extends number | boolean | null | undefined ? T :
  T extends (infer E)[] ? Plain<E>[] :
  T extends object ? { [K in keyof T]: Plain<T[K]> } : T;

// Prometheus has settings of its own in an annotation. The package does not contain them.
type OfPrometheus = { expr: string; step: string; titleFormat: string; textFormat: string };
type Annotation = Plain<AnnotationQuery> & (OfPrometheus | { builtIn: number });
type Board = Omit<Plain<Dashboard>, 'annotations'> & { annotations?: { list?: Annotation[] } };
"""


def columns(panel):
    """Return the settings of each column that belong to the type of the panel."""
    overrides = [one["properties"] for one in panel["fieldConfig"]["overrides"] or ()]
    settings = [{one["id"]: one["value"] for one in properties if one["id"] != BEFORE_9_5} for properties in overrides]
    return [{name[7:]: one[name] for name in one if name.startswith("custom.")} for one in settings]


def script(boards):
    """Return a TypeScript module with each board, and with the options and settings of each panel, as typed values."""
    lines = [HEADER]
    for kind, path in MODULES.items():
        imported = f"@grafana/schema/dist/esm/raw/composable/{path}_types.gen"
        lines.append(f"import type * as {kind.replace('-', '')} from '{imported}';")
    for name, board in boards.items():
        lines.append(f"export const {name}: Board = {json.dumps(board)};")
        for panel in (one for one in all_panels(board) if one["type"] != "row"):
            own, types = f"{name}_{panel['id']}", panel["type"].replace("-", "")
            settings = panel["fieldConfig"]["defaults"].get("custom", {})
            lines.append(f"export const {own}_options: Plain<{types}.Options> = {json.dumps(panel['options'])};")
            typed = f"Plain<{types}.FieldConfig>" if panel["type"] in WITH_SETTINGS else "Record<string, never>"
            lines.append(f"export const {own}_settings: {typed} = {json.dumps(settings)};")
            for number, column in enumerate(filter(None, columns(panel))):  # other settings have no type
                typed = f"Partial<Plain<{types}.FieldConfig>>"
                lines.append(f"export const {own}_column{number}: {typed} = {json.dumps(column)};")
    return "\n".join(lines) + "\n"


@pytest.fixture
def errors(tmp_path):
    """Return a function that returns the errors of the TypeScript compiler for a script.

    The packages of Grafana are in the folder of packages that contains the compiler.
    """
    compiler = shutil.which("tsc")
    packages = Path(compiler).resolve().parents[2] if compiler else Path()
    if not (packages / "@grafana" / "schema").is_dir():
        pytest.skip("make boards-check fetches the types of Grafana for this test")

    def compiled(text):
        (tmp_path / "boards.ts").write_text(text, encoding="utf-8")
        (tmp_path / "node_modules").symlink_to(packages)
        options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
        command = [compiler, *options, "--moduleResolution", "bundler", "boards.ts"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    return compiled


def test_boards_have_the_types_of_the_newest_release(errors):
    assert "" == errors(script(BOARDS))


def test_compiler_reports_unknown_settings_and_values(errors):
    right = script({"pipeline": BOARDS["pipeline"], "incidents": BOARDS["incidents"]})
    wrong = (
        ('"placement": "bottom"', '"placement": "below"', """Type '"below"' is not assignable"""),
        ('"showHeader"', '"showHeading"', "showHeading"),
        ('"spanNulls"', '"spanNull"', "spanNull"),
        ('"rowHeight": 0.9', '"rowHeight": "0.9"', "Type 'string' is not assignable to type 'number'"),
        ('{"width": 180}', '{"widths": 180}', "widths"),
        ('"reduceOptions"', '"reduce"', '"reduce"'),
        ('"refresh": "10s"', '"refresh": 10', "Type 'number' is not assignable to type 'string'"),
    )
    for text, other, _ in wrong:
        assert text in right, text
        right = right.replace(text, other)
    found = errors(right)

    assert [] == [other for _, other, reported in wrong if reported not in found]
