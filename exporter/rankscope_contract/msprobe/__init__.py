"""Format of msprobe's output on disk: names and layout, for the code that writes it and the code that reads it."""
