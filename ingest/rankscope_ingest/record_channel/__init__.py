"""The client of the record channel: poll a rank, check the body of the response, and decode it into tables."""
