"""Out-of-process execution of code that nobody trusts. Standard library only."""
