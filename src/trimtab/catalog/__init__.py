"""Facts about devices, links, versions and words: data files with a source in each row, and look-up."""
