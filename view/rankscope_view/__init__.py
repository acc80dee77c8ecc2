"""Pages, figures and reports of runs. The modules read a store, calculate the numbers to show, and render them."""
