"""Parts shared by the export formats: options, report, targets on disk, and the selection of rows to export."""
