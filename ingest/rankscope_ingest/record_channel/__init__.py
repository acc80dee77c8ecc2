"""The client of the record channel: poll a rank, validate a body, decode it into tables."""
