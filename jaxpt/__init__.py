"""Post-training of mixture-of-experts language models by reinforcement learning."""
