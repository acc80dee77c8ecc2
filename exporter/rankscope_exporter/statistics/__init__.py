"""Statistics of tensors: one pass over the bytes, one table, one copy to the host. Knows neither names nor rules.

    table = StatisticsTable(len(plan), device)  # once
    group = MeasureGroup(rows)                  # once for each set of tensors that is measured together
    group.measure(tensors, table)               # in a hook: no host sync, no autograd, nothing changed
    copy = HostCopy(table)                      # at the end of the step
    finished = finish(copy)                     # on the publisher thread, a step later

Of every tensor, in this order: `norm` is the square root of the sum of squares; `norm`, `min`, `max` and `mean` are
over *finite* elements (mean divides by their count), null when there are none, and Inf when beyond float32. `nans`,
`infs`, `zeros` and `numel` count over *all* elements; zeros are |x| < zero_below, with the default of 0: x == 0.
Complex numbers stand for their modulus. Elements that a sparse tensor leaves out are zeros like any other. A DTensor
gives its shard. Nothing to measure (None, meta, freed or packed memory) leaves the entry absent.
"""

from rankscope_exporter.statistics.measure_group import MeasureGroup, backend_name, measure, warm_up, warm_up_seconds
from rankscope_exporter.statistics.table import Finished, HostCopy, StatisticsTable, copy_entries, finish

__all__ = [
    "Finished",
    "HostCopy",
    "MeasureGroup",
    "StatisticsTable",
    "backend_name",
    "copy_entries",
    "finish",
    "measure",
    "warm_up",
    "warm_up_seconds",
]
