"""Parts of all boards: the frame of a board, panels, and PromQL selectors."""
