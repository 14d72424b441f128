"""Names causes and cures: of a machine that is not in order, and of a run, from what it left behind."""
