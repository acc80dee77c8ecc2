"""Figures of runs with matplotlib. They need no display: nothing here imports pyplot, which could open a window.

Each function returns a `Figure`; `save` writes it to a file. A figure states its units, the reduction of its curves,
and each range without finite values. matplotlib is in the extra `plot`.
"""
