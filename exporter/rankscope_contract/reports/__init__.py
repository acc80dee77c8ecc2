"""The report of a run: its file name, and the child process that makes it at the end of a training."""
