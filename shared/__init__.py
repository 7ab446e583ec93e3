"""Torch-free ground that every role stands on: messages, the Redis data model, settings, errors."""
