"""Text to tokens, tasks to prompts, and both to packed rows."""
