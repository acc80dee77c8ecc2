"""From a record to its readers: publisher thread, rules, ring, spool, HTTP server, registration, and sinks."""
