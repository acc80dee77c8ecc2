"""Modules that several importers share, and the runner that stores the records of an importer."""
