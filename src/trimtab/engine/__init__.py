"""What tracing and training share: how one optimizer step is computed."""
