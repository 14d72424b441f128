"""Plans and runs as a page for a browser: figures drawn here, one file, nothing fetched."""
