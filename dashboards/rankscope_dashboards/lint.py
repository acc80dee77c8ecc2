"""Where our boards differ from the rules of Grafana's dashboard-linter, and why: the document of its `.lint` file.

A test applies the linter's rules, rewritten there, with exactly these exceptions.
"""

from __future__ import annotations

from typing import Any, Final

_IDENTITY: Final = "A series is told by run and rank, which take the places of job and instance."
_COUNTS: Final = "A count of incidents is shown as it is: increase() extrapolates, and makes 1.07 incidents of one."

COUNTER_PANELS: Final = ("Anomaly count", "Lost records", "Anomalies", "Tensors that fired", "GPUs with memory errors")


def exceptions() -> dict[str, Any]:
    """Return the document: rules that we do not follow at all, and panels that do not follow one."""
    everywhere = ("template-job-rule", "template-instance-rule", "target-job-rule", "target-instance-rule")
    entries = [{"panel": title} for title in COUNTER_PANELS]
    return {
        "exclusions": {
            **{rule: {"reason": _IDENTITY} for rule in everywhere},
            "target-counter-agg-rule": {"reason": _COUNTS, "entries": entries},
        }
    }
