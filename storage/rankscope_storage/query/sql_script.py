"""Write `rankscope.sql`: a script with which the `duckdb` program creates the views of a store.

The program needs no extension for the Delta log:

    duckdb -init <store>/rankscope.sql

The script needs DuckDB 1.4 or newer. It reads the list of files when it runs; `.read <store>/rankscope.sql` updates the
list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import UnwritableError
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.location import Location, located
from rankscope_storage.files.filesystem import bytes_content, filesystem
from rankscope_storage.log.entries import LOG_FOLDER
from rankscope_storage.sql.views import empty_select, raw_select, view_statements

FILE_NAME: Final = "rankscope.sql"

# DuckDB 1.3 can execute the script, but reads no integers that are split into bytes, as earlier releases wrote them.
# Python's DuckDB parses the whole script first: releases before 1.3 report the quoted name as a syntax error.
_VERSION_CHECK: Final = """\
CREATE OR REPLACE TEMP TABLE rankscope_version AS
SELECT CASE WHEN (major, minor) < (1, 4)
    THEN error('rankscope.sql needs DuckDB 1.4 or newer, and this is ' || version())
    ELSE version() END AS version,
  list_transform([major], lambda "rankscope.sql needs DuckDB 1.4 or newer": 1) AS is_known
FROM (SELECT TRY_CAST(regexp_extract(version(), 'v([0-9]+)[.]([0-9]+)', 1) AS INTEGER) AS major,
  TRY_CAST(regexp_extract(version(), 'v([0-9]+)[.]([0-9]+)', 2) AS INTEGER) AS minor);
"""

# The script is copied with its store. On Linux, the command line of the program has the path that the program reads.
# Without it, the working directory may be the copy.
_PLACE: Final = """\
SET VARIABLE rankscope_command_query = (
  SELECT 'SELECT ' || CASE WHEN count(*) = 0 THEN 'NULL' ELSE 'content FROM read_text(''/proc/self/cmdline'')' END
  FROM glob('/proc/self/cmdline')
);
SET VARIABLE rankscope_place = (
  SELECT CASE WHEN regexp_matches(command, '(^|[\\x00/ ])rankscope[.]sql\\x00')
    THEN regexp_extract(command, '([.]read +)?([^\\x00]*)rankscope[.]sql\\x00', 2) ELSE '' END
  FROM query(getvariable('rankscope_command_query')) AS found(command)
);
SET VARIABLE rankscope_root = (
  SELECT CASE WHEN count(*) > 0 THEN getvariable('rankscope_place') ELSE getvariable('rankscope_root') END
  FROM glob(getvariable('rankscope_place') || 'rankscope.sql')
);
"""

# A checkpoint has the files of its version, and later entries have the changes. query() is needed because the query for
# a missing one must not be bound: reading an empty list of files is an error.
_FILE_LIST: Final = """\
SET VARIABLE rankscope_checkpoint = (
  SELECT coalesce(max(parse_filename(file)[:20]::BIGINT), -1)
  FROM glob(getvariable('rankscope_log') || '*.checkpoint.parquet')
);
SET VARIABLE rankscope_entries = (
  SELECT coalesce(list(file ORDER BY file), [])
  FROM glob(getvariable('rankscope_log') || '*.json')
  WHERE regexp_full_match(parse_filename(file), '[0-9]{20}[.]json')
    AND parse_filename(file)[:20]::BIGINT > getvariable('rankscope_checkpoint')
);
SET VARIABLE rankscope_checkpoint_query = CASE WHEN getvariable('rankscope_checkpoint') < 0
  THEN 'SELECT NULL::VARCHAR AS path, NULL::VARCHAR AS dataset WHERE false'
  ELSE 'SELECT add.path AS path, add.partitionValues[''dataset''] AS dataset FROM read_parquet('''
    || replace(getvariable('rankscope_log'), '''', '''''')
    || lpad(getvariable('rankscope_checkpoint')::VARCHAR, 20, '0')
    || '.checkpoint.parquet'') WHERE add IS NOT NULL'
  END;
SET VARIABLE rankscope_entries_query = CASE WHEN len(getvariable('rankscope_entries')) = 0
  THEN 'SELECT NULL::BIGINT AS version, NULL::VARCHAR AS path, NULL::VARCHAR AS dataset, NULL::BOOLEAN AS added
    WHERE false'
  ELSE 'SELECT parse_filename(filename)[:20]::BIGINT AS version, coalesce(add.path, remove.path) AS path,
      add.partitionValues.dataset AS dataset, add IS NOT NULL AS added
    FROM read_json(getvariable(''rankscope_entries''), format = ''newline_delimited'', filename = true,
      maximum_object_size = 268435456, columns = {
        add: ''STRUCT(path VARCHAR, partitionValues STRUCT(dataset VARCHAR))'',
        remove: ''STRUCT(path VARCHAR)''})
    WHERE add IS NOT NULL OR remove IS NOT NULL'
  END;
CREATE OR REPLACE TEMP TABLE rankscope_files AS
WITH change AS (
  SELECT -1 AS version, path, dataset, true AS added FROM query(getvariable('rankscope_checkpoint_query'))
  UNION ALL BY NAME
  SELECT version, path, dataset, added FROM query(getvariable('rankscope_entries_query'))
)
SELECT dataset, getvariable('rankscope_root') || url_decode(path) AS file
FROM change
QUALIFY row_number() OVER (PARTITION BY path ORDER BY version DESC) = 1 AND added;
"""


def emit_views(path: str | Location, *, is_in_store: bool = False) -> str:
    """Return the text of a DuckDB script that creates the views of the store at `path`.

    When the script runs, it lists the files in the Delta log of the store. With `is_in_store`, the script is a file of
    the store, and reads the copy of the store whose script the program executes.
    """
    root = f"{located(path)}/"
    lines = [
        f"-- Views over the Rankscope store {root!r}. Generated; run it again to include new files.",
        _VERSION_CHECK,
        "SET TimeZone = 'UTC';",
        f"SET VARIABLE rankscope_root = {sql_string(root)};",
        _PLACE if is_in_store else "",
        f"SET VARIABLE rankscope_log = getvariable('rankscope_root') || '{LOG_FOLDER}/';",
        _FILE_LIST,
    ]
    for dataset in DATASETS:
        lines.extend(_dataset_statements(dataset))
    lines.extend([f"{statement};" for statement in view_statements(prefix="rankscope_raw_")])
    return "\n".join(lines) + "\n"


def write_sql_script(root: Location) -> None:
    """Write `rankscope.sql` into the store at `root`.

    A reader sees either the old or the new script, never a part of it. A store in a bucket has none, because the
    program would need an extension for S3.
    """
    if not isinstance(root, Path):
        return
    text = emit_views(root, is_in_store=True)
    try:
        filesystem(root).put(root, root / FILE_NAME, bytes_content(text.encode()), _unsynced)
    except OSError as error:
        raise UnwritableError(
            f"cannot write {root / FILE_NAME}: {error.strerror}. Check the free space of the disk"
        ) from error


def _unsynced(path: Location) -> None:
    """Leave the script to the disk: the next maintenance writes it again."""


def _dataset_statements(dataset: str) -> list[str]:
    files, query = f"rankscope_files_{dataset}", f"rankscope_query_{dataset}"
    read = raw_select(dataset, f"getvariable('{files}')", empty=False, columns=None)
    return [
        f"SET VARIABLE {files} = (SELECT coalesce(list(file), []) FROM rankscope_files WHERE dataset = '{dataset}');",
        f"SET VARIABLE {query} = CASE WHEN len(getvariable('{files}')) = 0",
        f"  THEN {sql_string(empty_select(dataset))}",
        f"  ELSE {sql_string(read)} END;",
        f"CREATE OR REPLACE TEMP VIEW rankscope_raw_{dataset} AS SELECT * FROM query(getvariable('{query}'));",
    ]
