"""Trains a job: the loop, and what keeps it going while memory, numbers and machines fail."""
