"""Strict gin: files and bindings in, a checked configuration of one root function out.

Gin accepts two things in silence that never have an effect: a macro that nothing uses and a
binding of something that nothing refers to. Here both are errors.
"""

import contextlib
import copy
import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config

CONFIG_FILE, OPERATIVE_FILE = "config.gin", "operative_config.gin"


class ConfigError(ValueError):
    """A configuration that can't be what was meant; the message says what to change."""


def parse(
    root: Callable, files: Sequence[str | Path] = (), bindings: Sequence[str] = ()
) -> Callable[..., Any]:
    """Reads a configuration and returns `root` with it applied.

    Everything has to be reachable from `root`, which the files name by its module, as in
    `train.train.seed = 1`. Whatever was parsed before is forgotten.

    Raises:
      ConfigError: an unknown name or parameter, a file that is missing or malformed, a
        macro without a value, or a binding that nothing uses.
    """
    gin.clear_config()
    missing = [str(file) for file in files if not Path(file).exists()]
    if missing:
        raise ConfigError(f"There is no file {', '.join(missing)} in {Path.cwd()}.")
    try:
        gin.parse_config_files_and_bindings(
            [str(file) for file in files], list(bindings), finalize_config=False
        )
        configured = gin.get_configurable(root)
        _reject_unused(f"{root.__module__}.{root.__name__}")
        gin.finalize()
    except ConfigError:
        raise
    except (ValueError, OSError, SyntaxError, ImportError, AttributeError) as error:
        raise ConfigError(f"The configuration does not parse: {error}") from error
    return configured


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, another configuration may be parsed and used; then this one is back."""
    held = (
        gin_config._CONFIG,
        gin_config._OPERATIVE_CONFIG,
        gin_config._IMPORTS,
        gin_config._SINGLETONS,
    )
    kept, is_locked = [copy.copy(part) for part in held], gin_config._CONFIG_IS_LOCKED
    try:
        yield
    finally:
        gin.clear_config()
        for part, value in zip(held, kept):
            part.update(value)
        gin_config._set_config_is_locked(is_locked)


def arguments(root: Callable) -> dict[str, Any]:
    """What the parsed configuration gives `root`, built: to use its parts elsewhere."""
    return gin.get_bindings(f"{root.__module__}.{root.__name__}")


def _reject_unused(root: str) -> None:
    config = gin_config._CONFIG
    references = list(gin_config.iterate_references(config))
    used = {reference.config_key for reference in references}
    macros = sorted(scope for scope, name in config if name == "gin.macro")
    unbound = sorted(
        scope for scope, name in used if name == "gin.macro" and (scope, name) not in config
    )
    if unbound:
        raise ConfigError(
            f"The macro(s) {unbound} are used but have no value. Defined are {macros}."
        )

    def is_used(scope: str, name: str) -> bool:
        if name == "gin.macro":
            return (scope, name) in used
        # A binding holds within its scope and in the scopes below it.
        return (scope, name) == ("", root) or any(
            name == other and (scope in ("", inner) or inner.startswith(f"{scope}/"))
            for inner, other in used
        )

    unused = [
        scope if name == "gin.macro" else f"{scope}/{name}".lstrip("/")
        for scope, name in config
        if not is_used(scope, name)
    ]
    if unused:
        raise ConfigError(
            f"Nothing in the configuration uses {unused}, so the value would have no "
            "effect. Check the spelling, or refer to it (name = @..., name = %...)."
        )


def text() -> str:
    """The configuration as it was asked for."""
    return gin.config_str()


def check_workdir(workdir: Path) -> None:
    """Refuses a workdir that holds a run of another configuration.

    Raises:
      ConfigError: with the lines that differ.
    """
    saved = workdir / CONFIG_FILE
    if not saved.exists() or saved.read_text() == text():
        return
    difference = [
        line
        for line in difflib.unified_diff(
            saved.read_text().splitlines(), text().splitlines(), lineterm="", n=0
        )
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    raise ConfigError(
        f"{workdir} holds a run of another configuration (- there, + asked for): "
        f"{'; '.join(difference)}. Choose another --workdir, or the same configuration."
    )


def save(workdir: Path) -> None:
    """Writes what was asked for; the run can be repeated from this file alone."""
    (workdir / CONFIG_FILE).write_text(text())


def save_operative(workdir: Path) -> None:
    """Writes every value in force, defaults included; complete once all were called."""
    (workdir / OPERATIVE_FILE).write_text(gin.operative_config_str())
