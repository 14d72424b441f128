"""The command line: one command a verb, thin over `trimtab.api`."""
