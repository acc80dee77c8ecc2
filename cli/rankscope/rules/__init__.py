"""Rules from files, their replay on stored runs, and the causes that they found in a run."""
