"""The worker: pulls jobs, generates with continuous batching, publishes token ids."""
