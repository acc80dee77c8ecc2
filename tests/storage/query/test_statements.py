"""A connection creates only the views that a statement needs, which a user cannot notice."""

from __future__ import annotations

import duckdb
import pytest
from tests.storage.rows import ask

from rankscope_contract.model.schema import DATASETS, ROLLUPS
from rankscope_storage.connection import connect
from rankscope_storage.connection.pool import DEFINITIONS
from rankscope_storage.sql.rollups import rollup_view
from rankscope_storage.sql.views import empty_select, empty_view


@pytest.mark.parametrize("name", ["run_eta", "tensor_global", "top_deviations", "loss_curve"])
def test_each_view_can_be_created_first_and_after_those_that_it_reads(connection, name):
    connection.query(f"SELECT '{name}'")
    defined = list(connection._views.instance.defined)

    assert name in defined
    assert all({*DEFINITIONS[made].reads} <= {*defined[:place]} for place, made in enumerate(defined))
    assert len(defined) < len(DEFINITIONS)


@pytest.mark.parametrize(
    "question", ["SHOW TABLES", "SELECT view_name FROM duckdb_views()", "FROM information_schema.tables"]
)
def test_statement_that_lists_views_returns_all_views(connection, question):
    listed = {value for row in ask(connection, question) for value in row}

    assert listed >= {*DATASETS, "tensor_global", "loss_curve"}


def test_view_that_is_named_by_a_parameter_or_in_any_case_is_found(store, connection):
    connection.execute("SET VARIABLE table_name = 'scal' || 'ars'")
    with connect(store.root, locked=True) as locked:
        found = locked.query("SELECT count(*) AS rows FROM query_table($name)", {"name": "loss_curve"})

    assert [0] == found["rows"].to_pylist()
    assert [(0,)] == ask(connection, "SELECT count(*) FROM query_table(getvariable('table_name'))")
    assert [(0,)] == ask(connection, 'SELECT count(*) FROM "Loss_Curve"')


def test_unknown_name_is_refused_with_a_similar_one(connection):
    with pytest.raises(duckdb.CatalogException, match="scalars"):
        connection.query("SELECT * FROM scalar")


def test_existing_views_show_new_rows(connection, writer, batch):
    assert [(0,)] == ask(connection, "SELECT count(*) FROM loss_curve")
    writer.append(batch(range(3)))

    for asked in ("loss_curve", "events JOIN scalars ON true RIGHT JOIN loss_curve ON true"):
        assert [(3,)] == ask(connection, f"SELECT count(*) FROM {asked}")


@pytest.mark.parametrize(("dataset", "rollups"), ROLLUPS.items())
def test_empty_rollup_view_has_the_columns_of_the_aggregating_one(dataset, rollups):
    with duckdb.connect() as plain:
        plain.execute(f"CREATE TABLE rows_of AS {empty_select(rollups)}")
        plain.execute(rollup_view(dataset, "rows_of"))
        expected = ask(plain, f"DESCRIBE {rollups}")
        plain.execute(empty_view(rollups))

        assert expected == ask(plain, f"DESCRIBE {rollups}")
