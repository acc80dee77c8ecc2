"""The calls and the JSON configuration of msprobe's training monitor, for scripts that were written for it.

`TrainerMon` takes the arguments of msprobe's; `Monitor("monitor_config.json")` takes its configuration as it is. The
table in docs/migration.md lists what each option, call and file becomes. No other part of Rankscope depends on this
folder: it registers its format with `config.loader`.
"""

from rankscope_exporter.compat.msprobe.config_translation import translated
from rankscope_exporter.compat.msprobe.tool_config import KEYS
from rankscope_exporter.compat.msprobe.trainer_mon import TrainerMon
from rankscope_exporter.config.loader import Dialect, register_dialect

__all__ = ["TrainerMon"]

register_dialect(Dialect("msprobe", frozenset(KEYS), translated))
