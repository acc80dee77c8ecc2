"""The checks of `rankscope doctor` and the format of its report."""
