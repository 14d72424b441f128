"""The built-in job naics: embeddings of industry codes, trained in stages."""
