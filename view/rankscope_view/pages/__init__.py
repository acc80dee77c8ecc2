"""HTML of the pages, one module each: pure functions from data to text."""
