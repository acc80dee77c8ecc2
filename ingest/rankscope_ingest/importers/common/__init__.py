"""Code that several importers share, and the runner that stores the records that an importer yields."""
