"""Watch jobs while they train: GPUs through NVML, runs through their folders."""
