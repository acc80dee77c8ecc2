"""Helpers that several importers share, and the runner that stores what an importer yields."""
