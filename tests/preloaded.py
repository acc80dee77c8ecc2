"""The last module that a process imports before it forks programs with monitors.

The import compiles the kernel for statistics, so that the programs only read it from numba's cache. It excludes all
objects of this moment from garbage collection: a collection in a program then does not search all of torch.
"""

import gc

from rankscope_exporter.statistics.numba_kernels import compile_measure

compile_measure(cache=True)
gc.collect()
gc.freeze()
