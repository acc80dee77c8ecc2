"""Compile the kernel for statistics, and keep all of torch from garbage collection, before programs are forked."""

import gc

from rankscope_exporter.statistics.numba_kernels import compile_measure

compile_measure(cache=True)
gc.collect()
gc.freeze()
