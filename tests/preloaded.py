"""Keep all of torch from garbage collection, before programs are forked."""

import gc

from rankscope_exporter.measure.kernels import measure_group  # noqa: F401 - programs need them

gc.collect()
gc.freeze()
