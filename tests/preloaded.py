"""Keep all of torch from garbage collection, before programs are forked."""

import gc

import rankscope_exporter.statistics  # noqa: F401 - programs need it

gc.collect()
gc.freeze()
