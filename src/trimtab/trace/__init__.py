"""From a job to a Trace: every allocation and operation of two steps, on fake tensors, without a GPU."""
