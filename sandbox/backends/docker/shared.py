"""What is the same in containers as in the local backend's sandboxes, taken from there."""

from sandbox.backends.local import workspace as workspace_lib
from sandbox.backends.local.backend import reason_of
from sandbox.backends.local.box import rlimits, set_own_limits
from sandbox.backends.local.shell import LOOP as SHELL_LOOP
from sandbox.backends.local.shell import TELL_STATE, State
from sandbox.backends.local.workspace import MAX_LAYERS, Layer, Snapshot, Workspace

pack, unpack = workspace_lib.pack, workspace_lib.unpack

__all__ = [
    "MAX_LAYERS",
    "SHELL_LOOP",
    "TELL_STATE",
    "Layer",
    "Snapshot",
    "State",
    "Workspace",
    "pack",
    "reason_of",
    "rlimits",
    "set_own_limits",
    "unpack",
]
