"""What runs inside a container: its first process, and how that starts programs.

These modules and `sandbox.linux` are all that a container gets of this package, and its
Python has only the standard library: so they import nothing else.
"""
