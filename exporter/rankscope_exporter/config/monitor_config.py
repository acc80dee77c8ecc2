"""`MonitorConfig`: all settings of a rank, in sections, and their validation.

The sources are Python, a JSON or TOML file, and the environment.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from rankscope_contract.model.identity import RUN_VARIABLE, check_run_name
from rankscope_contract.model.kinds import DEFAULT_OPS
from rankscope_contract.model.redaction import redacted
from rankscope_contract.rules import AnomalyRule, rule_from_config
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_exporter.config.hyperparameters import storable
from rankscope_exporter.config.loader import read_settings
from rankscope_exporter.measure.quantities import Quantity, select_quantities
from rankscope_exporter.measure.quantities.base import QuantityOptions, TargetNames
from rankscope_exporter.monitors.hangs.diagnosis import STACK_SIGNALS
from rankscope_exporter.monitors.throughput import ThroughputConfig
from rankscope_exporter.process.discovery import extension
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.identity import rank_from_environment, script_commit
from rankscope_exporter.process.lifecycle import DEFAULT_SIGNALS
from rankscope_exporter.process.validation import (
    REMOVED,
    Allowed,
    Checked,
    Converted,
    accepted_settings,
    at_least,
    check_keys,
    did_you_mean,
    is_list,
    listed,
    number,
    one_of,
    options_from,
    share_of,
    some_text,
    table,
    validate,
)
from rankscope_exporter.publish.serving_config import OFF, PREFIX, SERVE_VARIABLES, ServeConfig, flag_of
from rankscope_exporter.publish.sinks import Sink, sink_class
from rankscope_exporter.records.plan import chosen_ops

log = logging.getLogger("rankscope")

STOP_SIGNALS: Final = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Names of the signals with which users and schedulers stop a job."""

_MOST_SECONDS: Final = 1e9
"""Maximum value of each setting that is a number of seconds.

It is longer than any job, and near the maximum timeout with which a Python thread can wait.
"""
_SECONDS: Final = f"a number of seconds of at least 0 and at most {_MOST_SECONDS:g}"
Seconds = Annotated[float, number(_SECONDS, 0, _MOST_SECONDS)]
ReadingSeconds = Annotated[float, number("a number of seconds of at least 0", 0, advice="; 0 disables the readings")]
HangSeconds = Annotated[float, number(_SECONDS, 0, _MOST_SECONDS, "; 0 disables the detection of hangs")]

_SOME_SIGNALS: Final = Allowed(
    f"a list of some of {', '.join(STOP_SIGNALS)}",
    lambda value: is_list(value) and all(name in STOP_SIGNALS for name in value),
)


DEFAULT: Final = "default"
_RULES: Final = Allowed("a list of AnomalyRule values such as AnomalyNan()", is_list)


def _rules(given: Sequence[Any]) -> tuple[AnomalyRule, ...]:
    """Return the rules, and for the text "default" the default rules with other names than the given ones."""
    own = [None if entry == DEFAULT else _rule(entry) for entry in given]
    names = {rule.name for rule in own if rule is not None}
    defaults = [rule for rule in RANK_RULES if rule.name not in names]
    return tuple(one for rule in own for one in (defaults if rule is None else [rule]))


def _rule(entry: Any) -> AnomalyRule:
    if isinstance(entry, AnomalyRule):
        return entry
    if not isinstance(entry, dict):
        example = '{"rule_name": "AnomalyNan"}'
        raise ConfigError(
            f'rules must be a list of rules, or of tables such as {example}, or of "default", not {entry!r}'
        )
    try:
        return rule_from_config(entry)
    except ValueError as error:
        raise ConfigError(f"rules: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """Settings of the thread that reads hardware metrics of the rank's GPU, process and machine."""

    every_seconds: ReadingSeconds = 5.0
    """Seconds between two readings of the hardware; 0 disables the readings."""

    def __post_init__(self) -> None:
        validate(self, ConfigError, "hardware.")


def check_option_tables(options: Mapping[str, Any], quantities: Sequence[str], prefix: str = "") -> None:
    """Raise ConfigError if `options` has a table for a quantity that is not one of `quantities`."""
    for name in options:
        if name not in quantities:
            select_quantities([name])  # names the nearest one
            raise ConfigError(f"{prefix}options.{name} has no effect: add {name!r} to {prefix}quantities")


ALL: Final = "*"
OptionTables = Annotated[Mapping[str, Mapping[str, Any]], table("a table with one table for each quantity")]
SinkTables = Annotated[Mapping[str, Mapping[str, Any]], table("a table with one table for each sink")]
Hyperparameters = Annotated[Mapping[str, Any], table("a table, such as vars(args)"), Converted(storable)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Settings of captures.

    If one of `rules` fires on any rank, all ranks measure `quantities` at each of the next `steps` steps.
    """

    rules: tuple[str, ...] = (ALL,)
    """Names of the rules whose firing starts a capture; "*" means all rules."""
    quantities: Annotated[tuple[str, ...], Checked(select_quantities)] = ("activations", "gradients", "parameters")
    """Names of the quantities that are measured in addition during a capture."""
    options: OptionTables = field(default_factory=dict)
    """Options of quantities during a capture, by name of the quantity.

    By default, a quantity has the same options as outside of captures.
    """
    steps: Annotated[int, at_least(1)] = 5
    cooldown_steps: Annotated[int, at_least(0)] = 100
    """Number of steps after a capture in which firings do not start another capture."""
    max_captures: Annotated[int, at_least(1)] = 10
    """Maximum number of captures per process. Without it, a permanently broken run would be measured at every step."""
    flight_record: bool = True
    """True records the latest collectives of each rank at a capture, if there is a process group."""

    def __post_init__(self) -> None:
        if self.rules == ALL:  # type: ignore[comparison-overlap]  # checked below
            object.__setattr__(self, "rules", (ALL,))
        validate(self, ConfigError, "capture.")
        check_option_tables(self.options, self.quantities, "capture.")

    def chooses(self, rule: str | None) -> bool:
        return ALL in self.rules or rule in self.rules

    def settings(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the sampling settings during a capture; `options` are those of quantities outside of captures."""
        own = {name: options[name] for name in self.quantities if name in options}
        return {"quantities": self.quantities, "options": {**own, **self.options}, "every": 1, "times": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Settings of a monitor: quantities, sampling, rules, serving.

    The constructor validates them and raises ConfigError.
    """

    quantities: Annotated[tuple[str, ...], Checked(select_quantities)] = ("parameters", "gradients", "optimizer_state")
    tensors: TargetNames = ("*",)
    """Parameters to monitor: names, globs, or regular expressions after "re:".

    A parameter is monitored if one of them matches.
    """
    options: OptionTables = field(default_factory=dict)
    """Options of single quantities, by name of the quantity.

    Common options are targets, start_step, every, times and ranks.
    """
    sinks: SinkTables = field(default_factory=dict)
    """Sinks, which are outputs in addition to the record channel, by name.

    The value contains the settings of the sink.
    """
    every: Annotated[int, at_least(1, "a whole number of steps")] = 1
    """Sampling interval in steps: every n-th step is sampled. Tensors are not measured at the other steps."""
    times: Annotated[int, at_least(0, "a number of measured steps")] | None = None
    """Maximum number of sampled steps; null sets no limit."""
    ops: Annotated[tuple[str, ...], Checked(chosen_ops)] = DEFAULT_OPS
    """Statistics of tensors to publish.

    An empty list means `norm`. `rms` and `kurtosis` are published only if they are named.
    """
    switch_file: Annotated[str, some_text("a path")] | None = None
    """Path of a switch file: a configuration file that is watched during training.

    An edit of the file changes the sampling. Its key `dynamic_on` starts and stops sampling.
    """
    switch_poll_seconds: Annotated[
        float, number(f"a number of seconds above 0 and at most {_MOST_SECONDS:g}", math.ulp(0.0), _MOST_SECONDS)
    ] = 0.5
    """Seconds between two checks for changes of the switch file, and for changes that other ranks request."""
    dynamic_on: bool = False
    """In a switch file, true starts and false stops the sampling of tensors.

    Outside of a switch file, this setting has no effect.
    """
    max_overhead: Annotated[float | str | None, Checked(share_of)] = None
    """Maximum share of the training time that measurements may take, such as 0.01 or "1 %"; null sets no limit."""
    capture: CaptureConfig | None = None
    """Capture: additional measurements for some steps after a rule fires. null disables captures."""
    rules: Annotated[tuple[AnomalyRule, ...], _RULES, Converted(_rules)] = RANK_RULES
    """Anomaly rules, in order. They replace the default rules; the text "default" adds those with other names."""
    zero_below: Annotated[float, number("a number of at least 0", 0)] = 0.0
    """Threshold of the statistic `zeros`, which counts the elements x with |x| less than this threshold.

    With the threshold 0, the elements that are exactly 0 are counted.
    """
    steps: Literal["auto", "explicit"] = "auto"
    """Detection of steps.

    "auto" detects steps from forward, backward and optimizer. With "explicit", only `Monitor.end_step` ends a step.
    """
    phases: bool = True
    """True measures the phases of every step, such as forward, backward and optimizer."""
    run: Annotated[str, some_text("a name"), Checked(check_run_name)] | None = None
    """Name of the run.

    The environment variable RANKSCOPE_RUN takes precedence. The default is the job id of the scheduler, such as Slurm;
    without a job id, a generated name.
    """
    hyperparameters: Hyperparameters = field(default_factory=dict)
    """Hyper-parameters of the training, which are stored with the configuration of the run.

    Secrets are masked, and values that have no JSON form are stored as text.
    """
    statistics: Literal["auto", "torch"] = "auto"
    """Implementation of statistics.

    "auto" uses compiled kernels: one in C on a CPU, and one by Triton on a CUDA device, if they are available.
    "torch" uses neither.
    """
    exit_wait_seconds: Seconds = 5.0
    """Maximum seconds at the end of training that the rank waits until the service has committed the last records."""
    collectives_share: Annotated[float, number("a share from 0 to 1", 0, 1)] = 0.001
    """Maximum share of one CPU core for reading torch's flight recorder; 0 disables the reading."""
    hang_after_seconds: HangSeconds = 240.0
    """Seconds without a call into the monitor after which the rank reports a hang with stacks.

    0 disables the detection. It should be less than the service's [runs] stalled_after_seconds, so that the service
    receives the stacks in time.
    """
    hang_in_phase_after_seconds: HangSeconds = 1500.0
    """Seconds without a call into the monitor after which the rank reports a hang in an announced phase.

    The value also applies before the end of the first step.
    """
    stacks_signal: Annotated[str, one_of(*STACK_SIGNALS)] | None = None
    """Name of a signal, such as SIGUSR2, at which the rank records its stacks.

    By default there is no signal handler.
    """
    stop_signals: Annotated[tuple[str, ...], _SOME_SIGNALS] = DEFAULT_SIGNALS
    """Names of signals.

    Before such a signal ends the process, the rank records that it was stopped. An empty list disables this.
    """
    console: bool = True
    """True prints a banner on rank 0, and one line whenever a rule fires or a hang is detected."""
    enabled: bool = True
    remarks: tuple[str, ...] = ()
    """Messages that are logged once in `attach`.

    They name settings of the configuration of another monitor that Rankscope does not support.
    """
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        validate(self, ConfigError)
        check_option_tables(self.options, self.quantities)
        for quantity_class in select_quantities(self.quantities):
            self.options_of(quantity_class)
        for name in self.sinks:
            self.options_of_sink(sink_class(name))
        self._check_rules()
        if self.capture is not None:
            self._check_capture(self.capture)

    def without_secrets(self) -> MonitorConfig:
        """Return a copy without the token of the rank's server, to be written to a file or sent to a process."""
        found = copy.copy(self)  # not validated again: without a token the serve settings may be invalid
        object.__setattr__(found, "serve", self.serve.without_secrets())
        return found

    def _check_rules(self) -> None:
        if self.stacks_signal in self.stop_signals:
            raise ConfigError(
                f"{self.stacks_signal} is set in both stop_signals and stacks_signal: remove it from one of them"
            )
        names = [rule.name for rule in self.rules]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"rules: the name {repeated[0]!r} is used twice; set a different name=… in one of them")

    def _check_capture(self, capture: CaptureConfig) -> None:
        names = [rule.name for rule in self.rules]
        for name in capture.rules:
            if name != ALL and name not in names:
                raise ConfigError(f"capture.rules: there is no rule {name!r}; the rules are {listed(names, name)}")
        try:
            replace(self, capture=None, **capture.settings(self.options))
        except ConfigError as error:
            raise ConfigError(f"capture.{error}") from error

    def options_of(self, quantity_class: type[Quantity]) -> QuantityOptions:
        """Return the options of the quantity `quantity_class`, validated by its options class.

        Raises ConfigError if an option is invalid.
        """
        name = quantity_class.name
        given = self.options.get(name, {})
        options: QuantityOptions = options_from(quantity_class.options_class, given, f"options.{name}")
        if options.ops is not None and not quantity_class.measures_tensors:
            raise ConfigError(f"options.{name}.ops has no effect: the quantity {name} has no statistics of tensors")
        return options

    def options_of_sink(self, sink: type[Sink]) -> Any:
        """Return the settings of a sink, validated by its options class. Raises ConfigError if a setting is invalid."""
        return options_from(sink.options_class, self.sinks[sink.name], f"sinks.{sink.name}", "; write {} for none")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> MonitorConfig:
        """Return the configuration in a parsed document. Raises ConfigError; it suggests keys for unknown ones."""
        values = own_settings(settings)
        names = setting_names()
        check_keys(values, names, also_near=() if names.issuperset(values) else extension("configuration").KEYS)
        return cls(**values)

    @classmethod
    def from_msprobe(cls, settings: Mapping[str, Any]) -> MonitorConfig:
        """Return the configuration in msprobe's format, which `from_mapping` recognises too. Raises ConfigError."""
        return cls.from_mapping(extension("configuration").translated(settings, setting_names()))

    @classmethod
    def from_file(cls, path: str | Path) -> MonitorConfig:
        """Return the configuration in a `.toml` or `.json` file.

        A setting with a wrong value, or an unknown one, is logged and has its default. Raises ConfigError if there is
        no such file.
        """
        path, settings = Path(path), {}
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file, or its path is invalid")
        try:
            settings = own_settings(read_settings(path))
        except ConfigError as error:
            warn(f"{error}; the file is not used")
        return cls.from_mapping(accepted_settings(cls.from_mapping, settings, lambda text: warn(f"{path}: {text}")))

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> MonitorConfig:
        """Return this configuration with the values of RANKSCOPE_* environment variables, which take precedence.

        A variable with a wrong value is logged and not used. A variable whose name resembles that of a setting is
        logged with this name.
        """
        config = self
        if environment.get(f"{PREFIX}TOKEN") and environment.get(f"{PREFIX}TOKEN_FILE"):
            warn(f"{PREFIX}TOKEN_FILE is not used: {PREFIX}TOKEN is set, too")
            environment = {**environment, f"{PREFIX}TOKEN_FILE": ""}
        for name, change in VARIABLES.items():
            if text := environment.get(name):
                try:
                    config = change(config, text)
                except ConfigError as error:
                    warn(f"{name} is not used: {error}")
        for name in sorted(environment.keys() - VARIABLES.keys()):
            names = [known.removeprefix(PREFIX) for known in VARIABLES]  # all of them agree in the prefix
            hint = did_you_mean(name.removeprefix(PREFIX), names, f"{PREFIX}{{}}")
            if reason := REMOVED.get(f"serve.{name.removeprefix(PREFIX).lower()}"):
                hint = f" It was removed: {reason}."
            if hint and name.startswith(PREFIX) and name.split("_")[1] not in OTHER_VARIABLES:
                warn(f"the environment variable {name} has no effect.{hint}")
        return config


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"use a number of seconds, or 0 to disable hang detection, not {text!r}") from None


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(text.replace(",", " ").split())
    return () if names == (OFF,) else names


def _with_serve(name: str, config: MonitorConfig, text: str) -> MonitorConfig:
    return replace(config, serve=config.serve.with_variable(name, text))


VARIABLES: Final[Mapping[str, Callable[[MonitorConfig, str], MonitorConfig]]] = {
    f"{PREFIX}DISABLED": lambda config, text: replace(config, enabled=config.enabled and not flag_of(text)),
    RUN_VARIABLE: lambda config, text: replace(config, run=text),
    f"{PREFIX}HANG_AFTER_SECONDS": lambda config, text: replace(config, hang_after_seconds=_seconds(text)),
    f"{PREFIX}STACKS_SIGNAL": lambda config, text: replace(config, stacks_signal=text),
    f"{PREFIX}STOP_SIGNALS": lambda config, text: replace(config, stop_signals=_signals(text)),
    f"{PREFIX}SWITCH_FILE": lambda config, text: replace(config, switch_file=text),
    **{f"{PREFIX}{name.upper()}": functools.partial(_with_serve, name) for name in SERVE_VARIABLES},
}
"""The environment variables that set a setting of a rank, with the function that applies one to a configuration.

The function raises ConfigError for a wrong value. A setting follows those that its check reads.
"""

OTHER_VARIABLES: Final = frozenset(
    "BENCH BIN COMMITS COMPATIBLE CRASHES EXAMPLES FLEET FUZZ GPU GRAFANA HISTORY HOUR KILL NOTIFY "  # noqa: SIM905
    "PAGES PEERS PROMETHEUS RADOSGW READERS REQUIRE RETENTION RULES SCALE SEED SERVE SERVICES SHARED SOAK SPARK SQL "
    "STORE TEST THOROUGH UPDATE".split()
)
"""First words, after the prefix, of the variables that only commands, service, boards and tests of Rankscope read."""


def warn(text: str) -> None:
    """Log a warning about a setting, on one rank of each host."""
    if rank_from_environment(os.environ)[1] == 0:
        log.warning("%s", text)


def setting_names() -> set[str]:
    """Return the names of all settings of a MonitorConfig."""
    return {item.name for item in fields(MonitorConfig)}


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings`, perhaps in the format of another monitor, as our settings. Raises ConfigError if invalid."""
    unknown = settings.keys() - setting_names()
    if unknown and not unknown.isdisjoint(extension("configuration").KEYS):
        return dict(extension("configuration").translated(settings, setting_names()))
    return dict(settings)


DYNAMIC_VARIABLE: Final = "DYNAMIC_MONITOR"
"""Name of the environment variable with which the configuration file is also the switch file."""

Given = MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def config_of(given: Given) -> MonitorConfig:
    """Return the configuration of a script as a MonitorConfig. Raises ConfigError if it is invalid.

    With the environment variable DYNAMIC_MONITOR=true, the configuration file is also the switch file.
    """
    if given is None:
        return MonitorConfig()
    if isinstance(given, MonitorConfig):
        return given
    if isinstance(given, Mapping):
        return MonitorConfig.from_mapping(given)
    try:
        path = os.fspath(given)
    except TypeError as error:
        raise ConfigError(f"the configuration must be a MonitorConfig, a mapping or a path, not {given!r}") from error
    config = MonitorConfig.from_file(path)
    is_watched = config.switch_file is None and os.environ.get(DYNAMIC_VARIABLE, "").lower() == "true"
    return replace(config, switch_file=path) if is_watched else config


def public_settings(config: MonitorConfig) -> dict[str, Any]:
    """Return the configuration, secrets masked, as GET /config returns it and the service stores it."""
    settings = asdict(config)
    settings["rules"] = [{"rule_name": type(rule).__name__, "args": asdict(rule)} for rule in config.rules]
    shown: dict[str, Any] = redacted({**settings, "argv": sys.argv})
    return shown | {"git_commit": script_commit(sys.argv[0])}


def steps_from(name: str, value: Any, *, at_least: int) -> int:
    """Return `value` if it is a number of steps of at least `at_least`; else raise ConfigError, which names `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} must be a whole number of steps of at least {at_least}, not {value!r}")
    return value
