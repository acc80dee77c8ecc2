"""Replicas that are no longer equal: who disagrees with whom, from the hashes that ranks send."""
