"""Configuration of a monitor: its settings, the validation of settings, and configuration files."""
