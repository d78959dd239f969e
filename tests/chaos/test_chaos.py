"""Some seconds of chaos; `python tests/chaos/chaos.py --seconds 120` is the long form."""

from tests.chaos import chaos


def test_every_episode_resolves_once_whatever_is_killed():
    report = chaos.run(12, episodes=100)
    assert not chaos.faults(report), report
    assert sum(report["killed"].values()) > 5
    assert report["outcomes"].get("ok: graded", 0) > 50
