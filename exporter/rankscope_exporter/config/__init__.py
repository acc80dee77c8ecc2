"""Configuration of a monitor: settings, their validation, and configuration files."""
