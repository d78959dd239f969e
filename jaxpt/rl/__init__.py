"""The learner as arithmetic: logprobs, advantages, losses, and the pure update."""
