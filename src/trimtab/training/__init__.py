"""Trains a job under a plan, and keeps it going while memory, numbers and machines fail."""
