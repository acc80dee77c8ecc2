"""Statistics of tensors: one pass over the elements, one table for all tensors of a step, and one copy to the host.

The package knows neither the names of tensors nor the rules.

    table = StatisticsTable(len(plan), device)  # once
    group = MeasureGroup(rows)                  # once for each set of tensors that is measured together
    group.measure(tensors, table)               # in a hook: no host sync, no autograd, nothing changed
    copy = HostCopy(table)                      # at the end of the step
    finished = copy.finish()                    # on the publisher thread, a step later

`norm`, `min`, `max` and `mean` are over the *finite* elements (isfinite). `norm` is the square root of the sum of
squares. The values are null without a finite element, and Inf beyond the range of float32. `nans` (isnan), `infs`
(isinf), `zeros` and `numel` count over *all* elements; zeros are |x| < zero_below, or x == 0 with the default of 0. A
complex number counts as its modulus. NaNs are counted in `torch_backend` (`masked_sums`) and, in compiled
code, in `kernel.c` (CPU) and `triton_kernels` (CUDA). The implicit elements of a sparse tensor are zeros. If there
is nothing to measure (None, meta, freed or packed memory), the entry is absent.

A DTensor is measured as its local shard. Norms and other statistics of shards are not combined here, because that needs
communication: the view `tensor_global` of the store combines them.
"""
