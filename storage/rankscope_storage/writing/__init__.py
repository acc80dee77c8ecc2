"""Appending: who owns a shard, which rows are new, and how they become a version, exactly once."""
