"""The calls and the JSON configuration of msprobe's training monitor, for scripts that were written for msprobe.

`TrainerMon` has the arguments of msprobe's class. `Monitor("monitor_config.json")` accepts msprobe's configuration. The
table in docs/migration.md lists the equivalents of all options, calls and files. No other part of Rankscope depends on
this package. The package registers its configuration format with `config.loader`.
"""

from rankscope_exporter.compat.msprobe.config_translation import KEYS, translated
from rankscope_exporter.compat.msprobe.trainer_mon import TrainerMon
from rankscope_exporter.config.loader import Dialect, register_dialect

__all__ = ["TrainerMon"]

register_dialect(Dialect("msprobe", frozenset(KEYS), translated))
