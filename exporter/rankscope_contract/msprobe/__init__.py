"""Format of msprobe's output files: names and layout, shared by the code that writes and the code that reads them."""
