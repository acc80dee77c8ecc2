"""The machine under a rank: memory of its process and device, the GPU's board, the host."""
