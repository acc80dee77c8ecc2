"""What is done when a rule fires: measure more for some steps on all ranks, name the samples, tell the script."""
