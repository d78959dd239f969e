"""Rewards: episodes out of the jitted program, their results back, graded and typed."""
