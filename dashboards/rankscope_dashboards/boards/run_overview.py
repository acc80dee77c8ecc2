"""The Grafana board "Run overview": state, progress, convergence and speed of one run."""

from __future__ import annotations

import sys
from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue, hardware
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.events import RunState
from rankscope_contract.model.phases import LABEL, Phase
from rankscope_dashboards.boards.elements.annotations import RUN_ANNOTATIONS
from rankscope_dashboards.boards.elements.board import Section, make_board, sized
from rankscope_dashboards.boards.elements.firings import firings
from rankscope_dashboards.boards.elements.panels import (
    NO_FIRINGS,
    NO_SERVICE,
    ZERO_IS_GOOD,
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    fraction_text,
    over_ranks,
    stat_panel,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import (
    AHEAD,
    ONE_RUN,
    RANKS,
    SERVICE_RUN,
    at_end,
    in_life,
    increase,
    mean_loss,
    once,
    rate,
    service,
)
from rankscope_dashboards.boards.elements.states import STATE_TEXTS, state_number
from rankscope_dashboards.boards.elements.variables import RANK, RUN, SMOOTH
from rankscope_storage.base import service_catalogue

_COMPLETE: Final = f"{RunState.COMPLETED}|{RunState.STOPPED}"


def board() -> builders.Dashboard:
    """Return the board "Run overview" without its uid, which `boards()` sets."""
    values = (_progress(), _step(), _time_left(), _latest_loss(), _latest_speed())
    sections = (
        Section("Status", sized(3, 4, _state(), *values, _ranks_up(), _anomaly_count())),
        Section("Convergence", sized(12, 10, _loss(), _grad_norm())),
        Section("Speed", sized(12, 8, _tokens_per_second(), _step_time(), _learning_rate(), _pauses())),
        Section(
            "Other curves",
            sized(12, 8, _perplexity(), _logged_numbers()) + sized(8, 8, _mfu(), _tflops(), _skipped_steps()),
            is_folded=True,
        ),
    )
    return make_board(
        "Run overview",
        "State, progress, convergence and speed of one run.",
        sections,
        variables=(RUN, RANK, SMOOTH),
        annotations=RUN_ANNOTATIONS,
    )


def _state() -> PanelBuilder:
    text = PanelText(
        title="State",
        description="Last state of the run in the time range, as the service determines it from registrations, "
        "records, exit events and missing responses. Green: running. Blue: completed. Stalled: ranks respond but "
        "complete no step. Failed: `rankscope summary RUN` shows the rank and the reason.",
        mappings=STATE_TEXTS,
        empty=NO_SERVICE,
    )
    return stat_panel(text, Query(state_number(ONE_RUN, "[$__range]"), instant=True))


def _progress() -> PanelBuilder:
    text = fraction_text(
        "Progress",
        "Completed steps as a fraction of the planned steps (`total_steps`), at the end of the time range. It should "
        "rise steadily up to 100 %. If it stops, the panel State shows whether the run ended.",
        empty="The script set no total_steps",
    )
    return stat_panel(text, Query(in_life(service_catalogue.RUN_PROGRESS), instant=True))


def _time_left() -> PanelBuilder:
    text = PanelText(
        title="Time left",
        description="Time for the remaining steps at the speed of the last 30 s. It should fall as fast as the clock "
        "runs. It jumps after a checkpoint or an evaluation, and grows while training is slow.",
        unit="dtdurations",
        decimals=0,
        empty="The run has ended, makes no steps, or has no total_steps",
    )
    return stat_panel(text, Query(f"max by (run) ({service_catalogue.RUN_ETA.name}{SERVICE_RUN})", instant=True))


def _ranks_up() -> PanelBuilder:
    text = count_text(
        "Ranks up",
        "Ranks that are alive, and below them the ranks that the launch should have. Fewer than expected: some ranks "
        "never registered, ended early, or stopped responding. `/api/v1/targets` of the service lists them. Red: no "
        "rank is alive.",
        thresholds=((None, "red"), (1, "text")),
        empty="The run has completed or was stopped",
    )
    up, expected = (
        Query(f"sum(max by (run) ({metric.name}{SERVICE_RUN}) unless on (run) {_in(_COMPLETE)})", legend, instant=True)
        for metric, legend in ((service_catalogue.RANKS_UP, "up"), (service_catalogue.RANKS_EXPECTED, "expected"))
    )
    return stat_panel(text, up, expected, with_names=True)


def _anomaly_count() -> PanelBuilder:
    text = count_text(
        "Anomaly count",
        "Number of rule firings and its curve, including those of ranks that have ended. 0 is normal. Above 0: the "
        "board Incidents shows rule, rank and time, and `rankscope anomalies RUN` shows the first cause.",
        thresholds=ZERO_IS_GOOD,
        empty=NO_FIRINGS,
    )
    return stat_panel(text, Query(f"sum by (run) ({firings(AHEAD)})"))


def _step() -> PanelBuilder:
    text = count_text(
        "Step",
        "Highest step of the selected ranks at the end of the time range, also one in which a rank raised, and its "
        "curve. It rises while training runs. If it does not, look at the state and at the panel Steps behind of the "
        "board Ranks.",
    )
    return stat_panel(text, Query(f"max by (run) ({at_end(catalogue.STEP, RANKS, AHEAD)})"))


def _latest_loss() -> PanelBuilder:
    text = PanelText(
        title="Latest loss",
        description="Last logged loss of each name in the time range, mean of all ranks that logged it at its last "
        "step. Compare it with the curve below: it should fall or remain level. NaN and infinite values are red.",
        empty="The script logs no loss",
        thresholds=((None, "text"), (sys.float_info.max, "red")),  # the second one is that of an infinite loss
    )
    return stat_panel(
        text, Query(mean_loss(ONE_RUN, RANKS, "[$__range]"), "loss {{loss}}", instant=True), with_names=True
    )


def _latest_speed() -> PanelBuilder:
    text = PanelText(
        title="Latest speed",
        description="Tokens per second of all selected ranks, now. Compare it with the curve below: it should be level "
        "except at checkpoints and evaluations. 0: no step completes.",
        unit="suffix: tok/s",
        decimals=0,
        empty="The run has ended, or the script logs no tokens",
    )
    return stat_panel(text, Query(_speed("run"), instant=True))


def _loss() -> PanelBuilder:
    text = PanelText(
        title="Loss",
        description="Loss as logged, of the rank with the highest and the rank with the lowest value, and the mean "
        "of the ranks smoothed over the time of the variable Smoothing. It should fall or remain level. A gap means "
        "that no rank logged a loss. NaN is also a gap here and counts as an anomaly. If the curves of the ranks "
        "diverge, the ranks see different data or are no longer replicas.",
        minimum=None,
        empty="The script logs no loss",
    )
    raw = over_ranks(f"({catalogue.LOSS.name}{RANKS})", "max", "min", by="run, loss", legend="{{loss}}")
    smoothed = f"avg by (run, loss) {_smoothed(catalogue.LOSS)}"
    return time_series_panel(text, *raw, Query(smoothed, "{{loss}} smoothed"))


def _grad_norm() -> PanelBuilder:
    text = PanelText(
        title="Gradient norm",
        description="Highest and lowest gradient norm within each interval, so that a spike between two points is "
        "visible, and the smoothed mean of the ranks. The norm often rises some steps before the loss. The scale is "
        "logarithmic: a tenfold increase is one decade for every model. If it rises, check the data and the learning "
        "rate.",
        empty="The script logs no gradient norm",
    )
    series = f"{catalogue.GRAD_NORM.name}{RANKS}"
    high = Query(f"max by (run) (max_over_time({series}[$__interval]))", "highest")
    low = Query(f"min by (run) (min_over_time({series}[$__interval]))", "lowest")
    smoothed = Query(f"avg by (run) {_smoothed(catalogue.GRAD_NORM)}", "smoothed")
    return time_series_panel(text, high, low, smoothed, logarithmic=True)


def _learning_rate() -> PanelBuilder:
    text = PanelText(
        title="Learning rate",
        description="Learning rate of each parameter group. It should follow the schedule. Check a jump that is not "
        "in the schedule, and a warm-up that starts again after a restart.",
        unit="sci",
        decimals=2,
        empty="No optimizer is attached",
    )
    # A group with the name 0 gets the text "group 0".
    series = f"max by (run, group) ({catalogue.LEARNING_RATE.name}{RANKS})"
    query = f'label_replace({series}, "group", "group $1", "group", "([0-9]+)")'
    return time_series_panel(text, Query(query, "{{group}}"), many=True)


def _tokens_per_second() -> PanelBuilder:
    text = PanelText(
        title="Tokens per second",
        description="Tokens per second, as the sum of the selected ranks, and of the slowest rank, and samples per "
        "second of all. Ranks wait for each other, so all ranks slow down together. The board Ranks shows the slow "
        "rank, this panel does not. Dips at regular intervals are checkpoints or evaluations.",
        unit="suffix: /s",
        empty="The script logs no tokens and no samples",
    )
    slowest = f"min by (run) ({_speed('run, rank')})"
    samples = Query(f"sum by (run) {rate(catalogue.SAMPLES)}", "samples")
    return time_series_panel(text, Query(_speed("run"), "all ranks"), Query(slowest, "slowest rank"), samples)


def _step_time() -> PanelBuilder:
    text = PanelText(
        title="Step time",
        description="Duration of the step at the latest scrape, of the slowest and the fastest rank. A single peak "
        "is one slow step. A level that rises and does not fall has another cause: another job on the host, a "
        "throttled GPU, or a slow data loader.",
        unit="s",
    )
    return time_series_panel(text, *over_ranks(f"({catalogue.STEP_SECONDS.name}{RANKS})", "max", "min"))


def _pauses() -> PanelBuilder:
    text = PanelText(
        title="Pauses",
        description="Time since the latest step of any rank, and seconds of the slowest rank in checkpoints and "
        "evaluations. The height of a peak is the duration of the pause, also that of a restart. A pause that becomes "
        "longer from one checkpoint to the next: check the file system.",
        unit="s",
        empty=NO_SERVICE,
    )
    silence = f"time() - max by (run) ({service_catalogue.RUN_LAST_STEP.name}{SERVICE_RUN}) unless on (run) "
    silence += _in(f"{_COMPLETE}|{RunState.FAILED}")
    phases = increase(catalogue.PHASE_SECONDS, f'{LABEL}=~"{Phase.CHECKPOINT}|{Phase.EVALUATION}"')
    longest = Query(f"max by (run, {LABEL}) {phases}", f"{{{{{LABEL}}}}}")
    return time_series_panel(text, Query(silence, "since the latest step"), longest)


def _perplexity() -> PanelBuilder:
    text = PanelText(
        title="Perplexity",
        description="Exponential of each loss, mean of the ranks. It has a meaning only for a cross-entropy in nats, "
        "such as the loss of a language model. It should fall; read a rise like a rise of the loss.",
        empty="The script logs no loss",
    )
    query = f"exp({mean_loss(ONE_RUN, RANKS)})"
    return time_series_panel(text, Query(query, "{{loss}}"), logarithmic=True)


def _logged_numbers() -> PanelBuilder:
    text = PanelText(
        title="Other logged numbers",
        description="Numbers that the script logged under other names, such as the loss of an evaluation: the 20 first "
        "names, mean of the ranks. Their meaning and their normal values are those of the script.",
        minimum=None,
        empty="The script logs no other numbers",
    )
    query = f"topk by (run) (20, avg by (run, name) {once(catalogue.SCALAR, catalogue.SCALAR.name + RANKS)})"
    return time_series_panel(text, Query(query, "{{name}}"), many=True)


def _mfu() -> PanelBuilder:
    text = fraction_text(
        "Model FLOP utilisation",
        "FLOPs of forward and backward pass, without recomputation, relative to the peak of the devices. Mean of the "
        "ranks, and the lowest rank. The name shows how the FLOPs were determined. Compare a run with itself: if the "
        "level falls and does not recover, check for a slow GPU, a slow link and a slow data loader.",
        maximum=None,
        empty="The peak of this device is unknown, or no FLOPs are counted",
    )
    return time_series_panel(text, *_by_method(hardware.MFU))


def _tflops() -> PanelBuilder:
    text = PanelText(
        title="TFLOP/s per GPU",
        description="Model FLOPs per second on one device, in TFLOP/s. Also available if the peak of the device is "
        "unknown. Ranks wait for each other, so all slow down together. In pipeline parallelism each rank counts only "
        "the FLOPs of its own stage.",
        unit="suffix: TFLOP/s",
        empty="No FLOPs are counted in this run",
    )
    return time_series_panel(text, *_by_method(hardware.TFLOPS_PER_GPU))


def _skipped_steps() -> PanelBuilder:
    text = count_text(
        "Skipped steps",
        "Steps without an optimizer update within each interval, on the rank with the most. A few at the start are "
        "normal with a loss scaler. Steps that are skipped again and again mean that the gradients are not finite.",
        empty="No data of a skipped step in the time range",
    )
    return time_series_panel(text, Query(f"max by (run) ({increase(catalogue.SKIPPED_STEPS)})", "skipped"))


def _smoothed(metric: MetricSpec) -> str:
    """Return PromQL for the mean over the time of the variable Smoothing, which ends with the curve itself."""
    series = f"{metric.name}{RANKS}"
    return once(metric, f"avg_over_time({series}[$smooth]) and present_over_time({series}[$__interval])")


def _in(states: str) -> str:
    matcher = f'state=~"{states}"'
    return f"({service_catalogue.RUN_STATE.name}{service(matcher)} == 1)"


def _speed(by: str) -> str:
    return f"sum by ({by}) {rate(catalogue.TOKENS)}"


def _by_method(metric: MetricSpec) -> list[Query]:
    series = once(metric, metric.name + RANKS)
    return over_ranks(series, "avg", "min", by="run, method", legend="{{method}}")
