"""The samples of a page according to the parser of prometheus_client, the reference for the page parser."""

import json
import math

from prometheus_client.parser import text_string_to_metric_families


def reference(body):
    """Return (metric, labels, value, ts in µs) of each series of a page, without duplicates; None if it is invalid."""
    try:
        text = body.decode()
        plain = "\n".join(line for line in text.split("\n") if not line.strip().startswith("#"))
        samples = [sample for family in text_string_to_metric_families(plain) for sample in family.samples]
        rows = [_row(sample) for sample in samples]
    except Exception:
        return None
    first = {}
    for metric, labels, value, ts in rows:
        first.setdefault((metric, labels, ts), (metric, labels, value, ts))
    return list(first.values())


def _row(sample):
    present = {name: value for name, value in sample.labels.items() if value}
    present = {"exported_instance" if name == "instance" else name: value for name, value in present.items()}
    labels = json.dumps(present, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if present else None
    try:
        value = float(sample.value)
    except OverflowError:
        value = math.inf if sample.value > 0 else -math.inf
    ts = None if sample.timestamp is None else round(sample.timestamp * 1e6)
    if ts is not None and not 0 <= ts <= 253_402_300_799_000_000:
        raise ValueError("time out of range")
    return sample.name, labels, "NaN" if math.isnan(value) else value, ts


def rows_of(rows):
    """Return the result of the page parser in the same form; None if it rejected the page."""
    if isinstance(rows, Exception):
        return None
    values = ["NaN" if math.isnan(value) else value for value in rows.values.to_pylist()]
    ts = [None] * rows.rows if rows.ts is None else rows.ts.cast("int64").to_pylist()
    return list(zip(rows.metrics.to_pylist(), rows.labels.to_pylist(), values, ts, strict=True))
