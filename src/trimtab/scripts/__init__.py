"""Follow a training command as its owner types it: run it on a pretended GPU, and find its knobs."""
