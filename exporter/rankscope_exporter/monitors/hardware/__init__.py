"""Hardware metrics: a thread that reads the state of the GPU, the process and the machine."""
