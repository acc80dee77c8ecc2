"""A connection makes what a statement names, and nothing a user could tell from all of it being there."""

from __future__ import annotations

import duckdb
import pytest

from rankscope_contract.model.rollups import ROLLUPS
from rankscope_contract.model.schema import DATASETS
from rankscope_storage.connection import connect
from rankscope_storage.query.statements import definitions, needed_definitions
from rankscope_storage.sql.rollups import rollup_view
from rankscope_storage.sql.views import empty_select, empty_view

KNOWN = definitions(prefix="rankscope_raw.")


def test_what_is_named_comes_with_what_it_reads_and_before_it():
    assert ["scalars"] == needed_definitions("SELECT * FROM Scalars", KNOWN)
    assert ["scalars", "scalar_rollups", "scalar_history", "loss_curve"] == needed_definitions(
        'FROM "loss_curve"', KNOWN
    )
    assert [] == needed_definitions("SELECT 1", KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_whatever_is_read_is_made_before(name):
    made = needed_definitions(name, KNOWN)

    assert name in made
    assert [] == [
        read for place, made_name in enumerate(made) for read in KNOWN[made_name].reads if read not in made[:place]
    ]


@pytest.mark.parametrize("name", ["run_eta", "tensor_global", "top_deviations"])
def test_a_view_can_be_made_first_and_alone(connection, name):
    connection.query(f"SELECT '{name}'")

    assert name in connection._views.engine.defined


@pytest.mark.parametrize(
    "question", ["SHOW TABLES", "SELECT view_name FROM duckdb_views()", "FROM information_schema.tables"]
)
def test_who_lists_the_views_sees_them_all(connection, question):
    listed = {value for row in connection.sql(question).fetchall() for value in row}

    assert listed >= {*DATASETS, "tensor_global", "loss_curve"}


def test_a_view_that_only_a_parameter_names_is_found(store):
    with connect(store.root, locked=True) as connection:
        found = connection.query("SELECT count(*) AS rows FROM query_table($name)", {"name": "loss_curve"})

    assert [0] == found["rows"].to_pylist()


def test_a_name_spelt_in_another_way_is_found(connection):
    connection.execute("SET VARIABLE table_name = 'scal' || 'ars'")

    assert [(0,)] == connection.sql("SELECT count(*) FROM query_table(getvariable('table_name'))").fetchall()


def test_a_name_that_does_not_exist_is_refused_with_the_nearest(connection):
    with pytest.raises(duckdb.CatalogException, match="scalars"):
        connection.query("SELECT * FROM scalar")


def test_what_is_already_defined_follows_the_store(connection, writer, batch):
    assert 0 == connection.query("FROM loss_curve").num_rows
    writer.append(batch(range(3)))

    assert 3 == connection.query("FROM loss_curve").num_rows
    assert [(3,)] == connection.sql(
        "SELECT count(*) FROM events JOIN scalars ON true RIGHT JOIN loss_curve ON true"
    ).fetchall()


@pytest.mark.parametrize(("dataset", "rollups"), ROLLUPS.items())
def test_a_view_that_is_empty_by_its_text_has_the_columns_of_the_one_that_sums(dataset, rollups):
    with duckdb.connect() as plain:
        plain.execute(f"CREATE TABLE rows_of AS {empty_select(rollups)}")
        plain.execute(rollup_view(dataset, "rows_of"))
        expected = plain.sql(f"DESCRIBE {rollups}").fetchall()
        plain.execute(empty_view(rollups))

        assert expected == plain.sql(f"DESCRIBE {rollups}").fetchall()
