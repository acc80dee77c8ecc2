"""Tags and notes on the page: equal to the view `runs`, read on request and at most every few seconds."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rankscope_ingest.status_page import collect
from rankscope_ingest.status_page.collect import REFRESH_SECONDS, LabelReader, Labels
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.runs.tags import edit_tags, remove_tags, set_note, set_tags


@pytest.fixture
def root(tmp_path):
    row = {"run": "r", "state": "running", "ordinal": 1}
    table = pa.Table.from_pylist([row], schema=dataset_schema("runs"))
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables={"runs": table}, watermarks={}))
    return tmp_path / "store"


async def test_tags_are_refreshed_and_kept_while_the_store_cannot_be_read(root, monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(collect, "TIMEOUT_SECONDS", 60.0)
    reader = LabelReader(str(root), clock=lambda: now[0])
    try:
        assert {} == await reader.fresh()
        edit_tags(root, "r", set_tags({"a": "1", "b": "2"}), sync_to_disk)
        edit_tags(root, "r", set_note("n"), sync_to_disk)
        edit_tags(root, "r", remove_tags(["b"]), sync_to_disk)
        assert {} == await reader.fresh()
        now[0] = REFRESH_SECONDS
        assert {"r": Labels({"a": "1"}, "n")} == await reader.fresh()

        edit_tags(root, "r", set_note(""), sync_to_disk)
        with monkeypatch.context() as broken:
            broken.setattr(collect, "_LABELS", "no SQL")
            now[0] *= 2
            assert {"r": Labels({"a": "1"}, "n")} == await reader.fresh()
        assert "tags of runs cannot be read, retrying at the next request" in caplog.text
        now[0] *= 2
        assert {"r": Labels({"a": "1"}, None)} == await reader.fresh()
    finally:
        reader.close()
