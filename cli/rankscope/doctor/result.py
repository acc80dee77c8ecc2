"""Results of the checks of `rankscope doctor`, and their text and JSON formats. This module does no I/O."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_text


class State(enum.StrEnum):
    """State of the result of one check: passed, needs attention, or failed."""

    OK = "OK"
    WARN = "WARN"  # works or is optional, but needs attention
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `remedy` is the recommended action; it is empty if none is needed."""

    area: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Mask secrets: a text may contain an address or an answer."""
        object.__setattr__(self, "text", redacted_text(self.text, MAX_DOCUMENT))


def ok(area: str, text: str) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult(area, State.OK, text)


def warn(area: str, text: str, remedy: str = "") -> CheckResult:
    """Return the result of a check that found something that needs attention."""
    return CheckResult(area, State.WARN, text, remedy)


def fail(area: str, text: str, remedy: str) -> CheckResult:
    """Return the result of a failed check: a part of the installation does not work."""
    return CheckResult(area, State.FAIL, text, remedy)


def is_healthy(results: Iterable[CheckResult]) -> bool:
    """Return True if no check failed. Checks with a warning do not count as failed."""
    return all(result.state is not State.FAIL for result in results)


def report_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    """Yield the lines of the text report: the results grouped by area, then the summary."""
    area = ""
    for result in results:
        if result.area != area:
            yield from ([""] if area else [])
            yield result.area
            area = result.area
        first, *rest = result.text.splitlines() or [""]
        yield f"  {result.state:<4}  {first}"
        yield from (f"        {line}" for line in rest)
        if result.remedy:
            yield f"        -> {result.remedy}"
    yield ""
    yield summary(results)


def summary(results: Sequence[CheckResult]) -> str:
    """Return the summary line of the report, with the numbers of problems and warnings."""
    counts = {state: sum(result.state is state for result in results) for state in State}
    if not counts[State.FAIL] and not counts[State.WARN]:
        return "All checks passed."
    return f"Failed: {counts[State.FAIL]}. Warnings: {counts[State.WARN]}."


def as_json(results: Sequence[CheckResult]) -> str:
    """Return the report of `rankscope doctor` as JSON text."""
    document = {"healthy": is_healthy(results), "results": [asdict(result) for result in results]}
    return json.dumps(document, indent=2, ensure_ascii=False)
