"""What a sandboxed process may do with files, by Landlock: a second wall behind the mounts.

https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import struct

from sandbox import linux

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_FOLDER = 1, 4, 8
# An overlay takes a character device 0:0 for an erasure of what lies below, and users
# without privileges may make one.
_MAKE_DEVICES = 1 << 6 | 1 << 11
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
# The last right of each version of the interface, as a bit.
_RIGHTS = {1: 12, 2: 13, 3: 14, 4: 14, 5: 15}
_LOOK = _EXECUTE | _READ_FILE | _READ_FOLDER


def version() -> int:
    """Of the kernel's interface; 0 where there is none."""
    try:
        return linux.syscall("landlock", _CREATE, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(*, writable: tuple[str, ...]) -> None:
    """From here on this process and its children may only look at files, and execute.

    writable: folders below which they may do anything but make device files.
    Sockets in the abstract namespace and signals reach only processes bound as well, where
    the kernel knows how. After no_new_privs.
    """
    here = version()
    rights = (2 << _RIGHTS.get(here, 15)) - 1
    anything = rights & ~_MAKE_DEVICES
    scopes = _ABSTRACT_SOCKETS | _SIGNALS if here >= 6 else 0
    attributes = struct.pack("QQQ", rights, 0, scopes)
    size = 24 if here >= 6 else 16 if here >= 4 else 8
    ruleset = linux.syscall("landlock_create_ruleset", _CREATE, attributes, size, 0)
    for path, allowed in (
        ("/", _LOOK),
        *((path, anything) for path in writable),
    ):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, folder), 12)
        linux.syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        os.close(folder)
    linux.syscall("landlock_restrict_self", _RESTRICT, ruleset, 0)
    os.close(ruleset)
