"""Data of one step, from the events during training to the published record."""
