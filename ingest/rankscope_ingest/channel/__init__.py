"""The record channel from the reader's side: a body is fetched, read, and decoded into tables."""
