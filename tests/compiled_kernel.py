"""Compiles the kernel for statistics when it is imported, so that forked programs only read it from numba's cache."""

from rankscope_exporter.statistics.numba_kernels import compile_measure

compile_measure(cache=True)
