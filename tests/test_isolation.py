"""The check of isolation finds each layer that is missing: taken away here, one by one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import isolation
from sandbox.backends.backend import SandboxUnavailable
from sandbox.isolation import LAYERS, Finding
from sandbox.pool import Pool

ROOT = Path(__file__).resolve().parent.parent
INIT = "backends/local/init.py"
ZYGOTE = "backends/local/zygote.py"
BACKEND = "backends/local/backend.py"

# What is taken away: the layer that is then missing, and in each file what becomes of it.
# Between the machine and a sandbox there are the worker's namespaces and the zygote's: some
# are then shared not with the machine but with the grader.
WITHOUT = {
    "user namespace": (
        "namespace.user",
        {
            INIT: {
                "linux.unshare(linux.NEW_USER)": "",
                "linux.map_users(_INSIDE_UID, uid, uid)": "",
                "most = processes + 1 ": "most = 1000 ",  # it counts by namespace
                # Of which some belong to a namespace of its own.
                "linux.drop_capabilities(settings.last_capability)": "linux.prctl(38, 1)",
            }
        },
    ),
    "ipc namespace": (
        "grader.namespaces",
        {ZYGOTE: {"linux.NEW_PID | linux.NEW_IPC\n": "linux.NEW_PID\n"}},
    ),
    "uts namespace": (
        "grader.namespaces",
        {ZYGOTE: {"linux.NEW_UTS | linux.NEW_CGROUP\n": "linux.NEW_CGROUP\n"}},
    ),
    "cgroup namespace": (
        "namespace.cgroup",
        {ZYGOTE: {"linux.NEW_UTS | linux.NEW_CGROUP\n": "linux.NEW_UTS\n"}},
    ),
    "network namespace": (
        "grader.namespaces",
        {ZYGOTE: {"linux.unshare(linux.NEW_NET)": ""}},
    ),
    "hidden files": (
        "root",
        {ZYGOTE: {'("/usr", *config["shown"])': '("/usr", "/var", *config["shown"])'}},
    ),
    "init out of reach": ("proc", {INIT: {"linux.set_dumpable(False)": ""}}),
    "dropped capabilities": (
        "capabilities",
        {INIT: {"linux.drop_capabilities(settings.last_capability)": "linux.prctl(38, 1)"}},
    ),
    "filter of calls": ("seccomp", {INIT: {"linux.filter_calls(settings.filter)": ""}}),
    "ban on namespaces": (
        "further_namespaces",
        {INIT: {"linux.filter_calls(settings.filter)": ""}},
    ),
    "Landlock": (
        "landlock",
        {INIT: {"landlock.restrict(writable=_WRITABLE)": ""}},
    ),
    "limits": (
        "limits",
        {INIT: {"resource.setrlimit(getattr(resource, name), (soft, hard))": "pass"}},
    ),
    "limits of processes": (
        "processes",
        {
            INIT: {"most = processes + 1 ": "most = 1000 "},
            "cgroups.py": {"str(used + processes)": "str(used + 1000)"},
        },
    ),
    "quota": ("quota", {BACKEND: {"size=limits.workspace_bytes,": "size=1 << 30,"}}),
    "closed descriptors": (
        "environment",
        {INIT: {"os.closerange(len(descriptors), 1 << 16)": ""}},
    ),
    "grader's user": (
        "grader.user",
        {BACKEND: {'"grader": agent_uid + 1': '"grader": agent_uid'}},
    ),
    "memory group": (
        "group.memory",
        {"cgroups.py": {"self._allow_memory(memory_bytes)": "pass"}},
    ),
    "cpu group": (
        "group.cpu",
        {"cgroups.py": {"quota = max(int(cpus * _PERIOD), 1000)": "quota = -1"}},
    ),
}


def doctor(folder, *arguments):
    rows = folder / "rows.json"
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "sandbox.doctor",
            "--backend=local",
            f"--json={rows}",
            *arguments,
        ],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert rows.exists(), ran.stderr
    return ran, {row["layer"]: row["state"] for row in json.loads(rows.read_text())}


@pytest.fixture
def sandbox_without(tmp_path):
    """A copy of the package in which something was taken away."""

    def make(changes):
        ignored = shutil.ignore_patterns("__pycache__", "images")
        shutil.copytree(ROOT / "sandbox", tmp_path / "sandbox", ignore=ignored)
        for file, texts in changes.items():
            path = tmp_path / "sandbox" / file
            source = path.read_text()
            for old, new in texts.items():
                assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
                source = source.replace(old, new)
            path.write_text(source)
        return tmp_path

    return make


needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="users and control groups to take away are root's"
)


@needs_root
@pytest.mark.parametrize("what", sorted(WITHOUT))
def test_a_layer_that_was_taken_away_is_missed(sandbox_without, what):
    layer, changes = WITHOUT[what]
    ran, states = doctor(sandbox_without(changes))
    assert states[layer] == "missing", ran.stdout
    assert ran.returncode == 1
    assert f"missing   {layer}" in ran.stdout and "to mend it" in ran.stdout


@needs_root
def test_with_all_layers_there_is_nothing_to_say(tmp_path, sandbox_without):
    ran, states = doctor(sandbox_without({}))
    assert set(states) == {layer.name for layer in LAYERS}
    assert set(states.values()) == {"enforced"} and ran.returncode == 0, ran.stdout


@needs_root
def test_a_waiver_is_by_name_and_is_said(sandbox_without):
    layer, changes = WITHOUT["Landlock"]
    ran, states = doctor(sandbox_without(changes), "--waive", layer)
    assert states[layer] == "waived" and ran.returncode == 0
    ran = subprocess.run(
        [sys.executable, "-m", "sandbox.doctor", "--waive", "landlok"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ran.returncode == 2 and "landlok" in ran.stderr and "seccomp" in ran.stderr


def test_a_missing_layer_stops_a_pool_unless_it_is_waived(monkeypatch):
    found = [Finding(LAYERS[-1], "it was broken so")]
    monkeypatch.setattr(isolation, "findings", lambda results: found)
    name = LAYERS[-1].name
    with pytest.raises(
        SandboxUnavailable, match=rf"lack: {name} \(it was broken so; to mend"
    ):
        Pool()
    with Pool(waive=(name,)) as pool:
        assert pool.isolation == found
    with pytest.raises(ValueError, match=r"'nothing'.*seccomp"):
        Pool(waive=("nothing",))
