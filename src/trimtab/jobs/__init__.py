"""What to train: the Job base class, and how a job is found by name."""
