"""The built-in job bridge: two frozen language models that learn to read the same latents."""
