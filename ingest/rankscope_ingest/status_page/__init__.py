"""Status of the service, its runs and targets: collect it, and present it as JSON and as an HTML page."""
