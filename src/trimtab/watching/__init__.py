"""Looks on while jobs train: GPUs through NVML, runs through their folders."""
