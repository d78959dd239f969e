"""Sampling: the cache, the choice of the next token, and the decode loop."""
