"""msprobe's file layouts, shared by the formats `csv` and `sqlite`."""
