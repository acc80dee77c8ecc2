"""Next to the training: hardware, flight recorder, hangs; and at every step: time by phase, throughput, memory."""
