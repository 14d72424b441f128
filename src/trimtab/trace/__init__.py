"""Trace a job: record every allocation and operation of its first steps, on fake tensors, without a GPU."""
