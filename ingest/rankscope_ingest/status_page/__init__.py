"""The status of service, runs and targets: collected, as JSON, and as an HTML page."""
