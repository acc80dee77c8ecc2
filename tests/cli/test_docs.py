"""The documentation names every metric, command and column, its generated parts are current, its SQL statements run."""

import importlib.util
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rankscope.commands import subcommands
from rankscope.demo.report import STATEMENTS
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.base.service_catalogue import CATALOG
from rankscope_storage.connection import connect

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
QUESTIONS = re.findall(r"```sql\n(.*?)```", (DOCS / "sql-cookbook.md").read_text(encoding="utf-8"), re.DOTALL)
MAY_BE_EMPTY = ("having count(*) > 1", "'gap'", "highest\nfrom", "bucket_deviations", "from desync", "step_phases")
MAY_BE_EMPTY += ("'pre_coll", "tensor_rollups")
QUESTIONS += [statement for _, statement in STATEMENTS]


def test_generated_pages_are_current():
    specification = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(specification)
    sys.modules["docs_generate"] = generate
    specification.loader.exec_module(generate)

    assert [] == generate.stale()


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("metrics", [f"`{name}`" for name in CATALOG]),
        ("store", [f"`{field.name}`" for fields in DATASETS.values() for field in fields]),
        ("commands", [f"## `rankscope {name}`" for name in subcommands()]),
    ],
)
def test_every_metric_column_and_command_is_documented(page, names):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")

    assert [] == [name for name in names if name not in text]


def test_index_links_every_page():
    index = (DOCS / "index.md").read_text(encoding="utf-8")

    assert [] == [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and f"({page.name})" not in index]


def test_every_link_has_a_target():
    found = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
    links = [(page, link) for page in PAGES for link in found.findall(page.read_text(encoding="utf-8"))]

    assert [] == [(page, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]


def test_folders_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = re.findall(r"`((?:exporter|ingest|storage|dashboards|cli|benchmarks)/[\w/.]*)`", text)

    assert len(folders) >= 7
    assert [] == [folder for folder in folders if not (ROOT / folder).exists()]


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_sql_statement_of_the_docs_runs(sample_store, question):
    with connect(sample_store, locked=True) as connection:
        rows = connection.query(question).num_rows

    assert rows > 0 or any(part in question for part in MAY_BE_EMPTY)


def test_largest_updates_are_ordered_by_the_norm_of_the_update(tmp_path):
    """The update of `rotated` does not change its norm, that of `scaled` changes it by a tenth, `zero` has norm 0."""
    (question,) = (question for question in QUESTIONS if "largest_update" in question)
    own = {"run": "my-run", "attempt": 0, "rank": 1, "incarnation": "i"}
    after = {"rotated": (1.0, 1.4), "scaled": (1.1, 0.1), "zero": (0.0, 0.0)}
    norms, updates = [], []
    for step in (1, 2):
        for tensor, (norm, update) in after.items():
            common = {**own, "step": step, "seq": step}
            first = min(norm, 1.0)
            norms += [{**common, "tensor": tensor, "kind": "param_before", "norm": first}]
            norms += [{**common, "tensor": tensor, "kind": "param_after", "norm": norm}]
            updates += [{**common, "module": tensor, "kind": "update_norm", "value": update / step}]
    tables = {
        name: pa.Table.from_pylist([{**row, "ordinal": place} for place, row in enumerate(rows)], dataset_schema(name))
        for name, rows in (("tensor_stats", norms), ("features", updates))
    }
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={"i": 2}))
    with connect(tmp_path / "store") as connection:
        found = connection.query(question).to_pylist()

    assert [("rotated", pytest.approx(1.4), 1), ("scaled", pytest.approx(0.1), 1), ("zero", None, None)] == [
        (row["tensor"], row["largest_update"], row["at_step"]) for row in found
    ]


def test_readme_mentions_the_first_steps():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = ("make demo", "make test", "data-path.svg", "http_sd", "rankscope sql", "three lines")

    assert [] == [word for word in words if word not in text]


def test_tests_named_in_guarantees_exist():
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named if (ROOT / file).exists()}

    assert len(named) > 20
    assert [] == [(file, name) for file, name in named if f"def {name}" not in sources.get(file, "")]


def test_configuration_page_requires_no_optional_setting():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")

    assert "### `[[exporters]]`" in page
    for setting in ("options", "sinks", "hyperparameters", "capture.options"):
        assert f"| `{setting}` | none |" in page


def test_pages_agree_about_stalled_runs_and_list_the_special_names_of_log():
    pages = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("live", "first-week", "pages")}
    (row,) = re.findall(r"^\| reports \|([^|]*)\|", pages["live"], re.MULTILINE)
    names = pages["pages"].partition("| name in `log()` | effect |")[2].partition("\n\n")[0]

    assert "[critical] sleeper: RunStalled, rank 1" in pages["first-week"]
    assert "`RunStalled`" in row
    for name in ("`loss`", "`train_loss`", "`eval_loss`", "`valid_loss`", "`tokens`", "`learning_rate`", "`step`"):
        assert name in names, name
