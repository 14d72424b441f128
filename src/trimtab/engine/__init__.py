"""The step program: build, cast, shard, recompute, compile, update. Tracer and trainer both run it."""
