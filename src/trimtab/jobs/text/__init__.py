"""Text to train on: where it is, how it becomes tokens, and how those become samples."""
