"""The one writer of a shard: new rows by watermark, and commits that store each row exactly once."""
