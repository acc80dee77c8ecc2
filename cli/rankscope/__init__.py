"""The front door: `import rankscope` gives the training API, the `rankscope` command everything else."""
