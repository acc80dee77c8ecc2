"""Every collective of the process, torch's own included: read from torch's flight record, at a bounded cost."""
