"""The Delta log: what a version is, how the next one comes to be, and which files it names."""
