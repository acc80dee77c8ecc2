"""Code shared by the export formats: options, report, target files, and the selection of rows to export."""
