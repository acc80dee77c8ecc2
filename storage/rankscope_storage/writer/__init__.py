"""The only writer of a shard: it selects new rows by watermarks, and its commits store each row exactly once."""
