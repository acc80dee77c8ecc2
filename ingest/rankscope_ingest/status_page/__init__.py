"""Status of service, runs and targets: collected, as JSON values, and as an HTML page."""
