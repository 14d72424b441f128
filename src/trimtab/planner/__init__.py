"""Plan a training job: list the legal settings, search them with estimates, and explain the choice."""
