"""Estimates of memory and time, computed from traces and device facts, without a GPU."""
