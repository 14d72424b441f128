"""Read and edit the config files of frameworks: every value in its place, with backups."""
