"""Runs a Python program in a fork of the zygote, as `python script.py` would.

Starting an interpreter costs ten times what the rest of a sandbox does, and most programs
need nothing that a forked one has not.
"""

import atexit
import builtins
import dataclasses
import gc
import itertools
import os
import signal
import sys
import types

_FLAGS = frozenset("ISEsBq")  # that a fork can honour


@dataclasses.dataclass(frozen=True)
class Program:
    """Source code as text (for -c) or in a file, and how the interpreter is set up."""

    argv: list[str]
    code: str | None
    flags: frozenset[str]


def parse(words: list[str]) -> Program | None:
    """The program of a command line; None if it takes a real interpreter."""
    flags: set[str] = set()
    for number, word in enumerate(words):
        if not word.startswith("-"):
            return Program(words[number:], None, frozenset(flags))
        if word == "-c" and number + 1 < len(words):
            argv = ["-c", *words[number + 2 :]]
            return Program(argv, words[number + 1], frozenset(flags))
        if not word[1:] or not set(word[1:]) <= _FLAGS:
            return None
        flags |= set(word[1:])
    return None


def run(program: Program) -> None:
    """Runs it and ends this process as an interpreter ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    _prepare(program)
    code, before = 0, len(sys.modules)
    try:
        _execute(program)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        # As from an interpreter: without the frames above the program's.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    os._exit(_finish(code, before))


def _finish(code: int, before: int) -> int:
    """Does what the end of an interpreter does, and returns the exit code.

    The interpreter's own way frees every object, and so copies all that the fork shares.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    # Files that the program left open are written when the last names for them go.
    # Only the latest modules are looked at: whatever is touched is copied.
    latest = tuple(
        itertools.islice(reversed(sys.modules), max(len(sys.modules) - before, 0))
    )
    for name in ("__main__", *latest):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or ""
        if name == "__main__" or (file and not file.startswith(sys.prefix)):
            getattr(module, "__dict__", {}).clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return 120
    return code


def _prepare(program: Program) -> None:
    # The zygote's streams are of the same descriptors, and nothing has used them.
    sys.argv = list(program.argv)
    if "I" not in program.flags:
        folder = "" if program.code is not None else os.path.dirname(program.argv[0])
        sys.path.insert(0, folder if program.code is not None else os.path.abspath(folder))
    if "S" not in program.flags:
        import site

        site.main()


def _execute(program: Program) -> None:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    name = "<string>"
    source: str | bytes | None = program.code
    if source is None:
        name = program.argv[0]
        module.__file__ = name
        try:
            with open(name, "rb") as file:
                source = file.read()
        except OSError as error:
            print(f"python: can't open file {name!r}: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    exec(compile(source, name, "exec"), module.__dict__)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
