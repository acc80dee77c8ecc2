"""Names of folders, files, columns and tags in the output of msprobe. Import and export use them, without torch."""
