"""Answers of the record channel from a disk: what left the ring, and what dead processes left. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from rankscope_contract.channel import (
    ARROW_STREAM,
    FIRST_HEADER,
    HEAD_HEADER,
    INCARNATION_HEADER,
    LAST_HEADER,
    LOST_HEADER,
    RING_FILL_HEADER,
    ROWS_HEADER,
    STATE_DRAINING,
    STATE_HEADER,
)
from rankscope_contract.spool import Orphan, Stretch
from rankscope_exporter.serving.http_server import Answer


def stretch_answer(stretch: Stretch, standing: Mapping[str, str], after: int) -> Answer:
    """Return records from a disk; what is missing before them is missing for good."""
    headers = {
        **standing,
        FIRST_HEADER: str(stretch.first),
        LAST_HEADER: str(stretch.last),
        ROWS_HEADER: str(stretch.rows),
    }
    if stretch.first > after + 1:
        headers[LOST_HEADER] = f"{after + 1}-{stretch.first - 1}"
    return Answer(HTTPStatus.OK, (stretch.data,), ARROW_STREAM, headers)


def orphan_answer(
    orphan: Orphan, standing: Mapping[str, str], after: int, committed: int | None, max_bytes: int
) -> Answer:
    """Answer for a dead process as it would have answered while it drained: 503 says that a store has everything.

    `committed` is what the holder of the lease has durably, None from anybody else.
    """
    try:
        if committed is not None:
            orphan.commit(committed)
        stretch = orphan.after(after, max_bytes)
    except OSError as error:
        return Answer.text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{orphan.folder}: {error.strerror or error}")
    headers = {
        **standing,
        INCARNATION_HEADER: orphan.incarnation,
        HEAD_HEADER: str(orphan.head),
        RING_FILL_HEADER: "1.000",
        STATE_HEADER: STATE_DRAINING,
    }
    if stretch is not None:
        return stretch_answer(stretch, headers, after)
    if not orphan.is_done:
        return Answer(HTTPStatus.NO_CONTENT, headers=headers)
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, (b"drained: everything is committed\n",), headers=headers)
