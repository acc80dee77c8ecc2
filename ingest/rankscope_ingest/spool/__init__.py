"""What dead processes left on disk: found, stored, and then deleted."""
