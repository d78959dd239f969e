"""The model: its shape as data, its parameters as a pytree, its behaviour as functions."""
