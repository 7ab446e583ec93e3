"""The detokenizer: token ids in, text out, one lease per shard."""
