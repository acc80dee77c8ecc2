"""File layouts of msprobe, which the formats `csv` and `sqlite` share."""
