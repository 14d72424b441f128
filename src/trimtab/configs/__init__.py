"""The user's own config files: read, understood, and edited in place."""
