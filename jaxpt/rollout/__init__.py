"""Episodes: prompts in, trajectories with their outcomes out."""
