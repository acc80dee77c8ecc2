"""PromQL selectors for panels. A selector determines whether a query reads only live data or also the store.

With the configuration that `rankscope up` writes, Prometheus queries the store only for selectors that contain the job
of the ranks (`required_matchers`). Selectors on metrics of ranks contain this job, so that boards also show steps from
before the start of Prometheus. Metrics of the service are not in the store.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_dashboards.deploy.prometheus import RANKS_JOB
from rankscope_storage.base import service_catalogue

RATE_WINDOW: Final = "[$__rate_interval]"

AHEAD: Final = "[$__interval] offset -$__interval"
"""Window after a time of evaluation.

The last one is up to an interval before the end of the time range, in a small panel of 24 h a quarter of an hour.
"""

OF_JOB: Final = f'job="{RANKS_JOB}"'
ONE_RUN: Final = 'run="$run"'
SEVERAL_RUNS: Final = 'run=~"$run"'

_RANK: Final = 'rank=~"$rank"'
OF_HOSTS: Final = 'host=~"$host"'
OF_KIND: Final = 'kind="$kind"'
OF_TENSORS: Final = 'tensor=~"$tensor"'
"""Label matchers for the hosts that are selected in the board Ranks, and kind and tensors in the board Tensors."""

NORM: Final = 'op="norm"'


def _selector(*matchers: str) -> str:
    return "{" + ", ".join(matchers) + "}"


SERVICE_RUN: Final = _selector(ONE_RUN)
SERVICE_RUNS: Final = _selector(SEVERAL_RUNS)
SERVICE_RANKS: Final = _selector(ONE_RUN, _RANK)
"""Label matchers for live metrics of the service.

SERVICE_RUN matches the run that is selected in the board, SERVICE_RUNS the runs on a board that can select several.
SERVICE_RANKS matches the selected ranks of the selected run."""

RANKS: Final = _selector(OF_JOB, ONE_RUN, _RANK)
ALL_RANKS: Final = _selector(OF_JOB, ONE_RUN)
RANKS_OF_RUNS: Final = _selector(OF_JOB, SEVERAL_RUNS)
"""Label matchers for live and stored metrics of ranks.

RANKS matches the run and the ranks that are selected in the board, ALL_RANKS all ranks of the selected run, and
RANKS_OF_RUNS all ranks on a board that can select several runs.
"""


def ranks(*matchers: str) -> str:
    """Return a selector for live and stored metrics of the ranks that are selected in the board.

    `matchers` are additional label matchers of the selector.
    """
    return _selector(OF_JOB, ONE_RUN, _RANK, *matchers)


def service(*matchers: str) -> str:
    """Return a selector for live metrics of the service about the run that is selected in the board."""
    return _selector(ONE_RUN, *matchers)


def once(metric: MetricSpec, expression: str) -> str:
    """Return PromQL with one sample for each set of labels of `metric` in `expression`, enclosed in parentheses.

    If Prometheus scrapes a process under two jobs, or reads it from a pair of servers with the label `replica`, each
    series exists twice. Sums, counts, means and quantiles over ranks would then count the process twice.
    """
    by = f" by ({', '.join(metric.all_labels)}) " if metric.all_labels else ""
    return f"(max{by}({expression}))"


def at_end(metric: MetricSpec, selector: str = "", window: str = "[$__range]") -> str:
    """Return PromQL for the last value within the time range of the board, also of a series that has ended.

    With another `window`, it is the last value within this time; without one, the present value.
    """
    series = f"{metric.name}{selector}"
    return f"last_over_time({series}{window})" if window else series


def in_life(metric: MetricSpec, run: str = ONE_RUN) -> str:
    """Return PromQL for the last value of a gauge of the service within the time range, live or else from the store.

    `run` is the label matcher for the runs. The result has only the label `run`.
    """
    live, stored = (at_end(metric, _selector(*matchers)) for matchers in ((run,), (OF_JOB, run)))
    return f"(max by (run) ({live}) or max by (run) ({stored}))"


def mean_loss(run: str, ranks: str, window: str = "") -> str:
    """Return PromQL for the losses of runs: of the main loss the mean of the ranks that logged it at the same step.

    Of a loss with a name, and of a live run without its store, it is the mean of the last loss of each rank. `run` is
    the label matcher for the runs, `ranks` the selector of their ranks, and `window` that of `at_end`. Without one, the
    result ends with the run, although the service continues to export its last loss.
    """
    stored, kept = (
        at_end(service_catalogue.RUN_LOSS, _selector(OF_JOB, run), window),
        service_catalogue.RUN_LOSS.name + _selector(run),
    )
    each = once(catalogue.LOSS, at_end(catalogue.LOSS, ranks, window))
    live = f"max by (run) ({kept})" + ("" if window else f" and on (run) {catalogue.LOSS.name}{ranks}")
    return f"(max by (run) ({stored}) or {live} or avg by (run, loss) {each})"


def rate(metric: MetricSpec, *matchers: str) -> str:
    """Return PromQL for the increase per second of a counter of the selected ranks."""
    return _of_counter("rate", metric, (ONE_RUN, _RANK, *matchers))


def rate_of_runs(metric: MetricSpec) -> str:
    """Return PromQL for the increase per second of a counter, on a board that can select several runs."""
    return _of_counter("rate", metric, (SEVERAL_RUNS,))


def increase(metric: MetricSpec, *matchers: str) -> str:
    """Return PromQL for the increase of a counter of the selected ranks within each interval of the panel."""
    return _of_counter("increase", metric, (ONE_RUN, _RANK, *matchers))


def _of_counter(function: str, metric: MetricSpec, matchers: tuple[str, ...]) -> str:
    """Return PromQL that applies `function` to scraped samples, or to stored samples of ranks that were not scraped.

    The two kinds of samples must not be merged, as they would be by a Prometheus that was started a few hours ago.
    `/metrics` shows a step a few milliseconds after its timestamp in the store, so that a merged counter seems to
    decrease. PromQL treats a decrease as a counter reset and adds the full counter value to the rate.
    """
    scraped, stored = _selector(*matchers), _selector(OF_JOB, *matchers)
    chosen = _selector(*(one for one in matchers if one in {ONE_RUN, SEVERAL_RUNS, _RANK}))
    was_scraped = f"present_over_time({catalogue.STEP.name}{chosen}{RATE_WINDOW})"
    return once(
        metric,
        f"{function}({metric.name}{scraped}{RATE_WINDOW}) or "
        f"{function}({metric.name}{stored}{RATE_WINDOW}) unless on (run, rank) {was_scraped}",
    )
