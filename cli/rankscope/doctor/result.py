"""What an examination found: one line each, with what to type next where something is wrong. Pure."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass


class State(enum.StrEnum):
    """How one thing is."""

    OK = "OK"
    WARN = "WARN"  # works, or is not needed; worth knowing
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` is what to do about it, empty where nothing is to be done."""

    area: str
    state: State
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(area, State.OK, text)


def warn(area: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that one should know of."""
    return Finding(area, State.WARN, text, remedy)


def fail(area: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps something from working."""
    return Finding(area, State.FAIL, text, remedy)


def healthy(findings: Iterable[Finding]) -> bool:
    """Return whether nothing keeps anything from working."""
    return all(finding.state is not State.FAIL for finding in findings)


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the report as a person reads it."""
    area = ""
    for finding in findings:
        if finding.area != area:
            yield from ([""] if area else [])
            yield finding.area
            area = finding.area
        first, *rest = finding.text.splitlines() or [""]
        yield f"  {finding.state:<4}  {first}"
        yield from (f"        {line}" for line in rest)
        if finding.remedy:
            yield f"        -> {finding.remedy}"
    yield ""
    yield summary(findings)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    if not counts[State.FAIL] and not counts[State.WARN]:
        return "All is well."
    return f"Does not work: {counts[State.FAIL]}. Worth knowing: {counts[State.WARN]}."


def as_json(findings: Sequence[Finding]) -> str:
    """Return the report for a program."""
    document = {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)
