"""Run training steps: build, cast, shard, recompute, compile, update. Tracer and trainer share this code."""
