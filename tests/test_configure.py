"""Strict gin: every config file parses, and nothing is ignored."""

from pathlib import Path

import pytest

from jaxpt import configure, train
from jaxpt.configure import ConfigError

ROOT = Path(__file__).resolve().parent.parent
RUNS = sorted((ROOT / "configs" / "runs").glob("*.gin"))
ALGORITHMS = sorted((ROOT / "configs" / "algorithms").glob("*.gin"))
GRPO = "configs/algorithms/grpo.gin"
QUICKSTART = ("configs/runs/quickstart.gin", GRPO)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def parse(*bindings, files=QUICKSTART):
    return configure.parse(train.train, files, bindings)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_parses(path):
    parse(files=[path, GRPO])


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_every_algorithm_parses(path):
    teacher = ["TEACHER = 'runs/teacher'"] if "TEACHER" in path.read_text() else []
    parse(*teacher, files=[QUICKSTART[0], path])


def test_every_other_config_is_included_by_a_run_and_includes_nothing():
    runs = "".join(path.read_text() for path in RUNS)
    for path in sorted((ROOT / "configs").rglob("*.gin")):
        if path not in (*RUNS, *ALGORITHMS):
            assert str(path.relative_to(ROOT)) in runs
            assert "include" not in path.read_text()


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("train.train.sede = 1", "sede"),
        ("losses.cliped.clip_low = 0.1", "cliped"),
        ("STPES = 5", r"uses \['STPES'\]"),
        ("train.train.seed = %SEED", "SEED"),
        ("optimizer.muon.beta3 = 0.1", "beta3"),
        ("other/optimizer.muon.momentum = 0.1", "other/"),
        ("losses.clipped.x = 1", "x"),
        ("config.DenseConfig.intermediate_size = 8", "DenseConfig"),
        ("train.train.seed = = 1", "parse"),
    ],
)
def test_what_would_have_no_effect_is_an_error(binding, message):
    with pytest.raises(ConfigError, match=message):
        parse(binding)


def test_an_unscoped_binding_reaches_the_scoped_uses():
    parse("optimizer.muon.momentum = 0.8")


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.gin"):
        parse(files=["nowhere.gin"])


def test_a_workdir_of_another_configuration_is_refused(tmp_path):
    parse("STEPS = 5")
    configure.save(tmp_path)
    configure.check_workdir(tmp_path)
    parse("STEPS = 6")
    with pytest.raises(ConfigError, match=r"-STEPS = 5; \+STEPS = 6"):
        configure.check_workdir(tmp_path)


def test_a_saved_configuration_is_the_run(tmp_path):
    parse("STEPS = 7")
    text = configure.text()
    configure.save(tmp_path)
    parse(files=[tmp_path / configure.CONFIG_FILE])
    assert configure.text() == text
