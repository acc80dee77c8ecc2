"""Hardware metrics: a thread that reads the GPU, the process and the machine."""
