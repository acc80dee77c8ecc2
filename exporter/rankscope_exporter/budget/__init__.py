"""What the monitor costs of training, kept within what was allowed, and accounted for to the last thread."""
