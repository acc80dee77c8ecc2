"""A connection creates only the views that a statement needs, which a user cannot notice."""

from __future__ import annotations

import duckdb
import pytest

from rankscope_contract.model.schema import DATASETS, ROLLUPS
from rankscope_storage.connection import connect
from rankscope_storage.query.statements import definitions, needed_definitions
from rankscope_storage.sql.rollups import rollup_view
from rankscope_storage.sql.views import empty_select, empty_view

KNOWN = definitions(prefix="rankscope_raw.")


def test_needed_definitions_include_and_follow_their_dependencies():
    assert ["scalars"] == needed_definitions("SELECT * FROM Scalars", KNOWN)
    assert [
        *("scalars", "runs", "scalar_rollups", "scalar_positions", "scalar_history", "loss_curve")
    ] == needed_definitions('FROM "loss_curve"', KNOWN)
    assert [] == needed_definitions("SELECT 1", KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_every_definition_follows_the_ones_it_reads(name):
    made = needed_definitions(name, KNOWN)

    assert name in made
    assert [] == [
        read for place, made_name in enumerate(made) for read in KNOWN[made_name].reads if read not in made[:place]
    ]


@pytest.mark.parametrize("name", ["run_eta", "tensor_global", "top_deviations"])
def test_each_view_can_be_created_first_and_alone(connection, name):
    connection.query(f"SELECT '{name}'")

    assert name in connection._views.instance.defined


@pytest.mark.parametrize(
    "question", ["SHOW TABLES", "SELECT view_name FROM duckdb_views()", "FROM information_schema.tables"]
)
def test_statement_that_lists_views_returns_all_views(connection, question):
    listed = {value for row in connection.sql(question).fetchall() for value in row}

    assert listed >= {*DATASETS, "tensor_global", "loss_curve"}


def test_view_named_only_by_a_parameter_is_found(store):
    with connect(store.root, locked=True) as connection:
        found = connection.query("SELECT count(*) AS rows FROM query_table($name)", {"name": "loss_curve"})

    assert [0] == found["rows"].to_pylist()


def test_view_name_is_found_in_any_case(connection):
    connection.execute("SET VARIABLE table_name = 'scal' || 'ars'")

    assert [(0,)] == connection.sql("SELECT count(*) FROM query_table(getvariable('table_name'))").fetchall()


def test_unknown_name_is_refused_with_a_similar_one(connection):
    with pytest.raises(duckdb.CatalogException, match="scalars"):
        connection.query("SELECT * FROM scalar")


def test_existing_views_show_new_rows(connection, writer, batch):
    assert 0 == connection.query("FROM loss_curve").num_rows
    writer.append(batch(range(3)))

    assert 3 == connection.query("FROM loss_curve").num_rows
    assert [(3,)] == connection.sql(
        "SELECT count(*) FROM events JOIN scalars ON true RIGHT JOIN loss_curve ON true"
    ).fetchall()


@pytest.mark.parametrize(("dataset", "rollups"), ROLLUPS.items())
def test_empty_rollup_view_has_the_columns_of_the_aggregating_one(dataset, rollups):
    with duckdb.connect() as plain:
        plain.execute(f"CREATE TABLE rows_of AS {empty_select(rollups)}")
        plain.execute(rollup_view(dataset, "rows_of"))
        expected = plain.sql(f"DESCRIBE {rollups}").fetchall()
        plain.execute(empty_view(rollups))

        assert expected == plain.sql(f"DESCRIBE {rollups}").fetchall()
