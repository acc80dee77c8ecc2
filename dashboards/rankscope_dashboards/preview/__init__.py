"""The content of a board without Grafana: its committed JSON, with the answers of a Prometheus to its queries.

The modules do what Grafana does with a board: variables, queries, transformations, units, mappings and thresholds. They
send no request and draw nothing: the caller passes a function that sends a request, and draws the returned panels.
"""
