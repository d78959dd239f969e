"""Some seconds of chaos; `chaos.py` and `broker.py` beside this have the long form."""

import shutil

import pytest

from tests.chaos import chaos


def test_every_episode_resolves_once_whatever_is_killed():
    report = chaos.run(12, episodes=100)
    assert not chaos.faults(report), report
    assert sum(report["killed"].values()) > 5
    assert report["outcomes"].get("ok: graded", 0) > 50


def test_every_episode_resolves_once_while_the_broker_dies():
    pytest.importorskip("nats", reason="nats-py is not installed (extra `remote`)")
    if shutil.which("nats-server", path="/usr/sbin:/usr/bin:/usr/local/bin") is None:
        pytest.skip("no nats-server: apt-get install nats-server")
    from tests.chaos import broker

    report = broker.run(12)
    assert not broker.faults(report), report
    assert sum(report["killed"].values()) >= 2 and report["jobs"] > 5
