"""Data of one step of a rank, from the events during training to the published record."""
