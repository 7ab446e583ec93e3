"""What clients send and get: request models (pydantic) and the shapes of replies (TypedDict)."""
