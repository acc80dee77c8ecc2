"""The view `first_causes`: for each run the causes of its anomalies, the first one first.

A cause is one rule that fires in steps that follow each other. Its row has the firing that comes first in the causal
order. At one step, exact rules come before statistical ones, because only exact ones cannot be chance.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import EVALUATION_NAME, REPLICA_DESYNC
from rankscope_contract.model.kinds import CAUSAL_STAGE, EVALUATION_STAGE, LOSS_STAGE, SCALAR_STAGE
from rankscope_contract.rules.anomaly import AnomalyNan
from rankscope_contract.rules.score import EXACT_RULES
from rankscope_storage.base.escaping import sql_string

INCIDENT_GAP_STEPS: Final = 20
"""Two consecutive anomalies of one attempt belong to one incident if at most this many steps are between them."""

IS_LOSS: Final = "kind IS NULL AND op = 'loss'"
STAGE: Final = f"""\
CASE WHEN {IS_LOSS} THEN {LOSS_STAGE}
  WHEN kind IS NULL AND regexp_extract(op, '{EVALUATION_NAME}', 0) <> '' THEN {EVALUATION_STAGE} ELSE
CASE kind {" ".join(f"WHEN '{kind}' THEN {at}" for kind, at in CAUSAL_STAGE.items())}
  ELSE {SCALAR_STAGE} + CASE WHEN kind IS NOT NULL OR op IS NULL THEN 0 ELSE 0.1 END END END"""
"""SQL of the position of an anomaly in the causal order of its step."""

_EXACT: Final = ", ".join(map(sql_string, (AnomalyNan().name, REPLICA_DESYNC, *(rule.name for rule in EXACT_RULES))))

FIRST_CAUSES: Final = f"""\
CREATE OR REPLACE VIEW first_causes AS
WITH firing AS (
  SELECT run, attempt, rank, step, ts, severity, rule, kind, tensor, op, value, baseline, threshold, message,
    CASE WHEN rule IN ({_EXACT}) THEN 0 ELSE 1 END AS is_statistical, {STAGE} AS stage,
    coalesce(micro_step, CASE WHEN {IS_LOSS} THEN 0 ELSE 1000000000 END) AS micro,
    coalesce(call_id, 1000000000) AS call,
    coalesce(abs(value) / nullif(coalesce(baseline, threshold), 0), 0) AS ratio,
    CASE WHEN step - lag(step) OVER (PARTITION BY run, attempt, rule ORDER BY step NULLS FIRST) > {INCIDENT_GAP_STEPS}
      THEN 1 ELSE 0 END AS begins
  FROM events WHERE type = 'anomaly'
),
numbered AS (
  SELECT *, sum(begins) OVER (PARTITION BY run, attempt, rule ORDER BY step NULLS FIRST) AS part FROM firing
),
placed AS (
  SELECT *, max(step) OVER cause AS last_step, count(*) OVER cause AS firings,
    max(CASE severity WHEN 'critical' THEN 2 WHEN 'warning' THEN 1 ELSE 0 END) OVER cause AS most,
    min(rank) OVER same AS lowest, max(rank) OVER same AS highest,
    row_number() OVER (PARTITION BY run, attempt, rule, part
      ORDER BY step NULLS LAST, micro, stage, call, ratio DESC, kind, tensor, op, rank NULLS FIRST) AS place
  FROM numbered
  WINDOW cause AS (PARTITION BY run, attempt, rule, part),
    same AS (PARTITION BY run, attempt, rule, part, step, kind, tensor, op)
)
SELECT run, row_number() OVER (PARTITION BY run
    ORDER BY attempt NULLS FIRST, step NULLS LAST, is_statistical, micro, stage, call, rule) AS cause,
  attempt, step, last_step, CASE most WHEN 2 THEN 'critical' WHEN 1 THEN 'warning' ELSE 'info' END AS severity, rule,
  -- Several ranks have the same statistic of a reduced gradient: none of them is the cause.
  CASE WHEN lowest = highest THEN rank END AS rank,
  kind, tensor, op, value, baseline, threshold, message, firings, ts
FROM placed WHERE place = 1
"""
