"""Configuration section [[watch]]: a log that is followed, and the thresholds for the state of its training."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rankscope_contract.model.identity import check_run_name
from rankscope_storage.base.rule_names import SLOW_FACTOR

RunName = Annotated[str, AfterValidator(check_run_name)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Rows = Annotated[int, Field(ge=1, le=1000)]


class WatchSection(BaseModel):
    """Configuration section [[watch]]: a log that is followed, and the thresholds for the state of its training.

    `rankscope watch` uses the same section for the logs on its command line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    log: Annotated[str, Field(min_length=1)]
    run: RunName | None = None
    format: str = "auto"
    loss: str | None = None
    pattern: tuple[str, ...] = ()
    known_hosts: str | None = None
    poll_seconds: Seconds = 10.0
    timeout_seconds: Seconds = 20.0
    max_backoff_seconds: Seconds = 60.0
    settle_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    stalled_factor: Factor = 3.0
    stalled_after_seconds: Seconds = 60.0
    stalled_in_phase_after_seconds: Seconds = 1800.0
    slow_factor: Factor = SLOW_FACTOR
    warm_up_rows: Rows = 10
    recovered_rows: Rows = 5
    failed_after_seconds: Seconds = 30.0
    unreadable_after_seconds: Seconds = 120.0
    message_rows: Rows = 10
    store_seconds: Seconds = 300.0
