"""The engine: sequences, blocks, scheduler, model and sampler. Knows nothing of Redis."""
