"""Parts that all boards are built from: board frame, panels, selectors."""
