"""What an alert says beyond its labels: templates that ask Prometheus at the moment of the alert. Pure.

A look-up that finds nothing, as for a rank whose page is gone, leaves no words behind. Each alert that stands asks at
every evaluation, so only alerts that are few may: one per rank and kind, not one per tensor.
"""

from __future__ import annotations

import json
from typing import Final

from rankscope_contract import metrics
from rankscope_contract.escaping import label_value

MOST_TENSORS: Final = 5
_WHO: Final = ("run", "rank")
_WHAT: Final = (*_WHO, "kind")


def latest_step() -> str:
    """Return where the rank is by now: the counters do not say at which step they moved."""
    return _found(_series(metrics.STEP, _WHO), _WHO, ' The rank is at step {{ . | first | value | printf "%.0f" }}.')


def fired_tensors(rule: str, window: str) -> str:
    """Return the tensors on which the rule fired most within `window`; a series that fires first is born by it."""
    fixed = f'rule="{label_value(rule)}", '.replace("%", "%%")
    series = _series(metrics.TENSOR_ANOMALY_EVENTS, _WHAT, fixed)
    born = f"{series} unless {series} offset {window}"
    query = f"topk({MOST_TENSORS}, increase({series}[{window}]) > 0 or ({born}))"
    names = "{{ range $at, $one := . }}{{ if $at }},{{ end }} {{ .Labels.tensor }} ({{ .Labels.op }}){{ end }}"
    return _found(query, _WHAT * 3, f" Tensors:{names}.")


def _series(metric: metrics.MetricSpec, labels: tuple[str, ...], fixed: str = "") -> str:
    """Return a selector with a hole for each label; %q writes strings as PromQL reads them."""
    return f"{metric.name}{{{fixed}{', '.join(f'{name}=%q' for name in labels)}}}"


def _found(query: str, labels: tuple[str, ...], text: str) -> str:
    values = " ".join(f"$labels.{name}" for name in labels)
    return f"{{{{ with printf {json.dumps(query)} {values} | query }}}}{text}{{{{ end }}}}"
