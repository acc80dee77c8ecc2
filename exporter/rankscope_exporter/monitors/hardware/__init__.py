"""A thread that reads the GPU, the process and the host."""
