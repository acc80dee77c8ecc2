"""Exporters that are not ours (node exporter, DCGM, …): found in lists, scraped, their text read into `samples`."""
