"""What is measured may change while training runs: who says so, and at which step all ranks follow."""
