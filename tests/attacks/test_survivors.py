"""What must not outlive its episode: processes, files, control groups."""

import os
import signal
import time

import pytest

from sandbox import cgroups
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from tests.attacks.arena import HONEST, PATIENCE, alive, job, needs_groups, told


@pytest.mark.parametrize("how", ["child", "setsid", "double_fork", "ignores_signals"])
@pytest.mark.parametrize("ending", ["exits", "is_killed"])
def test_nothing_of_a_program_is_left(attack, how, ending):
    marker = f"survivor-{how}-{ending}-{os.getpid()}"
    result = attack(
        f"""
        import os, signal, sys, time
        ready, up = os.pipe()
        if os.fork() == 0:
            if "{how}" == "setsid":
                os.setsid()
            if "{how}" == "double_fork" and os.fork():
                os._exit(0)
            if "{how}" == "ignores_signals":
                for number in range(1, 32):
                    if number not in (signal.SIGKILL, signal.SIGSTOP):
                        signal.signal(number, signal.SIG_IGN)
            os.write(up, b".")
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c",
                     "import time; time.sleep(1000)", "{marker}"])
        os.read(ready, 1)
        open("out", "w").write("5")
        if "{ending}" == "is_killed":
            time.sleep(1000)
        """,
        wall_seconds=2 if ending == "is_killed" else 30,
    )
    assert alive(marker) == []
    assert result.reason == ("graded" if ending == "exits" else "wall_timeout")


def test_a_late_writer_is_too_late(attack):
    result = attack(
        """
        import os, time
        ready, up = os.pipe()
        if os.fork() == 0:
            os.setsid()
            file = open("out", "r+b", buffering=0)
            os.write(up, b".")
            time.sleep(0.05)
            while True:
                file.seek(0)
                file.write(b"5")
        open("out", "w").write("6")
        os._exit(0)
        """
    )
    # Whichever came first: the main program's end is the end of its children.
    assert result.reason == "graded"
    assert result.verdict["components"] == {"right": 0.0}


@needs_groups
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_no_group_outlives_its_pool(how):
    def groups():
        return {
            group
            for hierarchy in cgroups.hierarchies()
            for group in hierarchy.folder.glob("jaxpt-sandbox-*")
        }

    with Pool(LocalWorkers(1)) as pool:
        (pid,) = pool.workers.pids
        own = {group for group in groups() if f"-{pid}-" in group.name}
        assert own
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
            assert pool.submit(job("after", HONEST)).result(PATIENCE).outcome == "ok"
            assert not own & groups()
    assert not own & groups()


def test_one_episode_leaves_nothing_to_the_next(pool):
    leave = """
    import os
    found = [f"{folder}/mark" for folder in ("/workspace", "/tmp", "/dev/shm")
             if os.path.exists(f"{folder}/mark")]
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        open(f"{folder}/mark", "w").close()
    open("out", "w").write(repr(found))
    """
    futures = [pool.submit(job(f"leave {number}", leave)) for number in range(4)]
    assert [told(future.result(PATIENCE)) for future in futures] == ["[]"] * 4


def test_many_hostile_programs_at_once_delay_nobody_for_long(pool):
    started = time.monotonic()
    attacks = [
        pool.submit(job(f"crowd {i}", "import time; time.sleep(60)", wall_seconds=0.2))
        for i in range(10)
    ]
    honest = [pool.submit(job(f"crowd honest {i}", HONEST)) for i in range(10)]
    assert {future.result(PATIENCE).reason for future in attacks} == {"wall_timeout"}
    assert {future.result(PATIENCE).outcome for future in honest} == {"ok"}
    assert time.monotonic() - started < 60  # one sleep; they were all cut short
