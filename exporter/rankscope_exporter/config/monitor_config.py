"""`MonitorConfig`: all settings of a rank and their validation.

The sources are Python, a JSON or TOML file, and the environment.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from rankscope_contract.model.kinds import DEFAULT_OPS, Kind
from rankscope_contract.rules import AnomalyRule, rule_from_config
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import MOST, check_keys, listed, share_of
from rankscope_exporter.config.loader import dialect_keys, read_settings, translated_from, translated_settings
from rankscope_exporter.config.sections import CaptureConfig, HardwareConfig, check_tables, checked_capture, tables_of
from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.monitors.hangs.stack_signal import STACK_SIGNALS
from rankscope_exporter.observers.throughput.peaks import ThroughputConfig
from rankscope_exporter.quantities import Quantity, select_quantities
from rankscope_exporter.quantities.base import QuantityOptions
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.sinks import Sink, sink_class
from rankscope_exporter.statistics.selection import chosen_ops

STOP_SIGNALS: Final = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Names of the signals with which users and schedulers stop a job."""

_HANG_VARIABLE: Final = "RANKSCOPE_HANG_AFTER_SECONDS"
_SIGNAL_VARIABLE: Final = "RANKSCOPE_STACKS_SIGNAL"
_STOP_VARIABLE: Final = "RANKSCOPE_STOP_SIGNALS"
_MAGNITUDES: Final = (
    "zero_below",
    "exit_wait_seconds",
    "hang_after_seconds",
    "hang_in_phase_after_seconds",
    "switch_poll_seconds",
    "collectives_share",
)
_MOST_SECONDS: Final = 1e9
"""Maximum of all settings in seconds. It is longer than any job, and near the maximum timeout of a thread."""
_SWITCH_VARIABLE: Final = "RANKSCOPE_SWITCH_FILE"

DEFAULT_QUANTITIES: Final = ("parameters", "gradients", "optimizer_state")

# A normal gradient norm changes by small factors; ten times its average is not noise. The mean of a gradient is a
# small difference of large sums. Its ratio to its own average has no meaning, so the default rules ignore it.
DEFAULT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(threshold=10.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Settings of a monitor: quantities, sampling, rules, serving.

    The constructor validates them and raises ConfigError.
    """

    quantities: tuple[str, ...] = DEFAULT_QUANTITIES
    tensors: tuple[str, ...] = ("*",)
    """Parameters to monitor: names, globs, or regular expressions after "re:".

    A parameter is monitored if one of them matches.
    """
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of single quantities, by name of the quantity.

    Common options are targets, start_step, every, times and ranks.
    """
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sinks, which are outputs in addition to the record channel, by name.

    The value contains the settings of the sink.
    """
    every: int = 1
    """Sampling interval in steps: every n-th step is sampled. Tensors are not measured at the other steps."""
    times: int | None = None
    """Maximum number of sampled steps; null sets no limit."""
    ops: tuple[str, ...] = DEFAULT_OPS
    """Statistics of tensors to publish.

    An empty list means `norm`. `rms` and `kurtosis` are published only if they are named.
    """
    switch_file: str | None = None
    """Path of a switch file: a file with these settings that is watched during training.

    Its key `dynamic_on` starts and stops sampling.
    """
    switch_poll_seconds: float = 0.5
    """Seconds between two checks of the switch file and of the other ranks."""
    dynamic_on: bool = False
    """In a switch file, true starts and false stops the sampling of tensors.

    Outside of a switch file, the setting has no effect.
    """
    max_overhead: float | str | None = None
    """Maximum share of the training time that measurements may take, such as 0.01 or "1 %"; null sets no limit."""
    capture: CaptureConfig | None = None
    """Capture: additional measurements for some steps after a rule fires. null disables captures."""
    rules: tuple[AnomalyRule, ...] = DEFAULT_RULES
    zero_below: float = 0.0
    """Threshold of the statistic `zeros`, which counts elements with |x| < zero_below.

    With 0, exact zeros are counted.
    """
    steps: Literal["auto", "explicit"] = "auto"
    """Detection of steps.

    "auto" detects steps from forward, backward and optimizer. With "explicit", only `Monitor.end_step` ends a step.
    """
    phases: bool = True
    """True measures the phases of every step, such as forward, backward and optimizer."""
    run: str | None = None
    """Name of the run.

    The environment variable RANKSCOPE_RUN takes precedence. The default is the job id, else a generated name.
    """
    statistics: Literal["auto", "torch"] = "auto"
    """Implementation of statistics on a CPU.

    "auto" uses the compiled kernel if numba is installed; "torch" never uses it.
    """
    exit_wait_seconds: float = 5.0
    """Maximum seconds at the end of training that the rank waits until the service has committed the last records."""
    collectives_share: float = 0.001
    """Maximum share of one CPU core for reading torch's flight recorder; 0 disables the reading."""
    hang_after_seconds: float = 240.0
    """Seconds without a call into the monitor after which the rank reports a hang with stacks.

    0 disables the detection. It should be less than the service's [runs] stalled_after_seconds, so that the service
    receives the stacks in time.
    """
    hang_in_phase_after_seconds: float = 1500.0
    """Seconds without a call into the monitor after which the rank reports a hang in an announced phase.

    The value also applies before the end of the first step.
    """
    stacks_signal: str | None = None
    """Name of a signal, such as SIGUSR2, at which the rank records its stacks.

    By default there is no signal handler.
    """
    stop_signals: tuple[str, ...] = ()
    """Names of signals, such as SIGTERM.

    Before such a signal ends the process, the rank records that it was stopped. The default is none.
    """
    console: bool = True
    """True prints a banner on rank 0, and one line whenever a rule fires or a hang is detected."""
    enabled: bool = True
    remarks: tuple[str, ...] = ()
    """Messages that are logged once in `attach`.

    They name settings of a translated msprobe configuration that are not supported.
    """
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        for name in ("quantities", "tensors", "rules", "stop_signals", "ops", "remarks"):
            object.__setattr__(self, name, listed(name, getattr(self, name), str if name != "rules" else object))
        self._check_types()
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every must be a whole number of steps of at least 1, not {self.every!r}")
        self._check_switching()
        if not self.zero_below >= 0:
            raise ConfigError(f"zero_below must be a number of at least 0, not {self.zero_below!r}")
        if not self.exit_wait_seconds >= 0:
            raise ConfigError(
                f"exit_wait_seconds must be a number of seconds of at least 0, not {self.exit_wait_seconds!r}"
            )
        if not 0 <= self.collectives_share <= 1:
            raise ConfigError(f"collectives_share must be a share from 0 to 1, not {self.collectives_share!r}")
        if self.statistics not in ("auto", "torch"):
            raise ConfigError(f"statistics must be 'auto' or 'torch', not {self.statistics!r}")
        if self.steps not in ("auto", "explicit"):
            raise ConfigError(f"steps must be 'auto' or 'explicit', not {self.steps!r}")
        try:
            Targets(self.tensors)
        except ValueError as error:
            raise ConfigError(f"tensors: {error}") from error
        try:
            chosen_ops(self.ops)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_options()
        for quantity_class in select_quantities(self.quantities):
            self.options_of(quantity_class)
        self._check_sinks()
        self._check_rules()
        self._check_hangs()
        self._check_stop_signals()
        share_of(self.max_overhead)
        remake = functools.partial(replace, self, capture=None)
        object.__setattr__(self, "capture", checked_capture(self.capture, self.rules, self.options, remake))

    def without_secrets(self) -> MonitorConfig:
        """Return the configuration as a mapping without the token, for a file or for another process."""
        found = copy.copy(self)  # not validated again: without a token the serve settings may be invalid
        object.__setattr__(found, "serve", self.serve.without_secrets())
        return found

    def _check_switching(self) -> None:
        times = self.times
        if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 0):
            raise ConfigError(f"times must be a number of measured steps of at least 0, not {times!r}")
        if not 0 < self.switch_poll_seconds < math.inf:
            raise ConfigError(
                f"switch_poll_seconds must be a number of seconds above 0, not {self.switch_poll_seconds!r}"
            )

    def _check_hangs(self) -> None:
        for name in ("hang_after_seconds", "hang_in_phase_after_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be a number of seconds of at least 0, not {getattr(self, name)!r}; "
                    "0 disables the detection of hangs"
                )
        if self.stacks_signal is not None and self.stacks_signal not in STACK_SIGNALS:
            raise ConfigError(f"stacks_signal must be one of {', '.join(STACK_SIGNALS)}, not {self.stacks_signal!r}")

    def _check_stop_signals(self) -> None:
        for name in self.stop_signals:
            if name not in STOP_SIGNALS:
                raise ConfigError(f"stop_signals must be a list of some of {', '.join(STOP_SIGNALS)}, not {name!r}")
            if name == self.stacks_signal:
                raise ConfigError(f"{name} is set in both stop_signals and stacks_signal: remove it from one of them")

    def _check_types(self) -> None:
        for name in ("console", "enabled", "dynamic_on", "phases"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name in _MAGNITUDES:
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ConfigError(f"{name} must be a number, not {getattr(self, name)!r}")
            most = _MOST_SECONDS if name.endswith("_seconds") else MOST
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most:g}, not {getattr(self, name)!r}")
        for name, what in (("run", "name"), ("switch_file", "path")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a {what}, not {value!r}")
        check_tables(self)

    def _check_rules(self) -> None:
        for rule in self.rules:
            if not isinstance(rule, AnomalyRule):
                raise ConfigError(f"rules must be a list of AnomalyRule values such as AnomalyNan(), not {rule!r}")
        names = [rule.name for rule in self.rules]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"rules: the name {repeated[0]!r} is used twice; set a different name=… in one of them")

    def options_of(self, quantity_class: type[Quantity]) -> QuantityOptions:
        """Return the options of the quantity `name`, validated by its options class.

        Raises ConfigError if an option is invalid.
        """
        name = quantity_class.name
        settings = self.options.get(name, {})
        if not isinstance(settings, Mapping):
            raise ConfigError(f"options.{name} must be a table of settings, not {settings!r}")
        known = {item.name for item in fields(quantity_class.options_class)}
        check_keys(dict(settings), known, f"options.{name}.")
        if settings.get("ops") is not None and not quantity_class.measures_tensors:
            raise ConfigError(f"options.{name}.ops has no effect: {name} has no statistics of tensors")
        try:
            return quantity_class.options_class(**settings)
        except ValueError as error:
            raise ConfigError(f"options.{name}: {error}") from error

    def _check_options(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options must be a table of tables by quantity, not {self.options!r}")
        for name in self.options:
            if name not in self.quantities:
                select_quantities([name])  # names the nearest one
                raise ConfigError(f"options.{name} has no effect: add {name!r} to quantities")

    def options_of_sink(self, sink: type[Sink]) -> Any:
        """Return the settings of a sink, validated by its options class. Raises ConfigError if a setting is invalid."""
        settings = self.sinks[sink.name]
        if not isinstance(settings, Mapping):
            raise ConfigError(f"sinks.{sink.name} must be a table of settings, not {settings!r}; write {{}} for none")
        check_keys(dict(settings), {item.name for item in fields(sink.options_class)}, f"sinks.{sink.name}.")
        try:
            return sink.options_class(**settings)
        except ValueError as error:
            raise ConfigError(f"sinks.{sink.name}: {error}") from error

    def _check_sinks(self) -> None:
        if not isinstance(self.sinks, Mapping):
            raise ConfigError(f"sinks must be a table of tables by sink, not {self.sinks!r}")
        for name in self.sinks:
            self.options_of_sink(sink_class(name))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> MonitorConfig:
        """Return the configuration in a parsed JSON or TOML document.

        Raises ConfigError; for an unknown key, the text suggests a similar key.
        """
        values = own_settings(settings)
        check_keys(values, setting_names(), also_near=dialect_keys())
        if "rules" in values:
            values["rules"] = tuple(_rule(entry) for entry in listed("rules", values["rules"], object))
        return cls(**{**values, **tables_of(values)})

    @classmethod
    def from_msprobe(cls, settings: Mapping[str, Any]) -> MonitorConfig:
        """Return the configuration in a parsed document in msprobe's format. Raises ConfigError if it is invalid.

        `from_mapping` accepts a document in this format too, if at least one of its keys exists only in msprobe.
        """
        return cls.from_mapping(translated_from("msprobe", settings, setting_names()))

    @classmethod
    def from_file(cls, path: str | Path) -> MonitorConfig:
        """Return the configuration in a `.toml` or `.json` file.

        Raises ConfigError with the file name and the reason.
        """
        path = Path(path)
        settings = read_settings(path)
        try:
            return cls.from_mapping(settings)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> MonitorConfig:
        """Return this configuration with the values of RANKSCOPE_* environment variables, which take precedence."""
        disabled = environment.get("RANKSCOPE_DISABLED", "") not in ("", "0")
        return replace(
            self,
            hang_after_seconds=_seconds(environment.get(_HANG_VARIABLE), self.hang_after_seconds),
            stacks_signal=environment.get(_SIGNAL_VARIABLE) or self.stacks_signal,
            stop_signals=tuple(environment.get(_STOP_VARIABLE, "").replace(",", " ").split()) or self.stop_signals,
            switch_file=environment.get(_SWITCH_VARIABLE) or self.switch_file,
            serve=self.serve.with_environment(environment),
            enabled=self.enabled and not disabled,
        )


def setting_names() -> set[str]:
    """Return the names of all settings of a MonitorConfig."""
    return {item.name for item in fields(MonitorConfig)}


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings`, which may be in the format of another monitor, as settings of a MonitorConfig.

    Raises ConfigError.
    """
    return translated_settings(settings, setting_names())


def _seconds(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError(
            f"{_HANG_VARIABLE} is {text!r}: use a number of seconds, or 0 to disable hang detection"
        ) from None


def _rule(entry: Any) -> AnomalyRule:
    if isinstance(entry, AnomalyRule):
        return entry
    if not isinstance(entry, dict):
        raise ConfigError(f'rules must be a list of tables such as {{"rule_name": "AnomalyNan"}}, not {entry!r}')
    try:
        return rule_from_config(entry)
    except ValueError as error:
        raise ConfigError(f"rules: {error}") from error
