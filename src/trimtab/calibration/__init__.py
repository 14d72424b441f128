"""Measures how fast the operations of training run on the GPU of this machine."""
