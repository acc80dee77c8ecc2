"""Looking after a store by hand: is it whole, what is in it, and what to do where it is not whole."""
