"""Bombs of every kind: time, processes, memory, files, output."""

from pathlib import Path

import pytest

from tests.attacks.arena import HONEST, needs_groups, told


@pytest.mark.parametrize(
    ("code", "reasons", "limits"),
    [
        ("while True: pass", {"cpu_timeout"}, {"cpu_seconds": 1}),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
            "while True: pass",
            {"killed_by_signal_9"},
            {"cpu_seconds": 1},
        ),
        (
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            {"wall_timeout", "cpu_timeout"},
            {"wall_seconds": 2},
        ),
        (
            "import os\nwhile os.fork() == 0: pass",  # each child forks and lives on
            {"missing_artifact", "nonzero_exit"},
            {},
        ),
        ("import os; os.kill(-1, 9)", {"nonzero_exit"}, {}),  # there is nobody
        ("import os; os._exit(0)", {"missing_artifact"}, {}),
        (b"\xff\xfe\x00\x80", {"nonzero_exit"}, {}),
        (b"", {"missing_artifact"}, {}),
        (
            "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
            {"killed_by_signal_11", "out_of_memory", "cpu_timeout"},
            {},
        ),
    ],
)
def test_a_program_that_only_breaks(attack, code, reasons, limits):
    result = attack(code, **limits)
    assert result.outcome == "policy_fail" and result.reason in reasons


def test_a_flood_of_output_keeps_head_and_tail(attack):
    result = attack(
        """
        import os
        os.write(1, b"first")
        block = b"x" * 10**6
        for _ in range(100):
            for stream in (1, 2):
                left = memoryview(block)
                while left:
                    left = left[os.write(stream, left):]
        os.write(1, b"last")
        open("out", "w").write("5")
        """,
        output_bytes=1000,
    )
    assert result.outcome == "ok"
    assert result.stdout.total_bytes == 10**8 + 9
    assert result.stderr.total_bytes == 10**8
    assert result.stdout.head == b"first" + b"x" * 495
    assert result.stdout.tail == b"x" * 496 + b"last"


def test_a_flood_without_end_is_cut_off(attack):
    result = attack("while True: print('x' * 10**5)", wall_seconds=1, cpu_seconds=30)
    assert result.reason == "wall_timeout"
    assert len(result.stdout.text()) < 17_000 < result.stdout.total_bytes


def test_output_of_any_bytes(attack):
    code = b"import sys\nsys.stdout.buffer.write(bytes(range(256)))\n"
    result = attack(code + HONEST.encode())
    assert result.stdout.head == bytes(range(256))
    assert "\ufffd" in result.stdout.text()


def test_processes_are_counted_over_the_whole_tree(attack):
    result = attack(
        """
        import os, time
        made = 0
        try:
            while made < 500:
                if os.fork() == 0:
                    time.sleep(1000)
                made += 1
        except OSError:
            pass
        open("out", "w").write(str(made))
        """,
        processes=8,
    )
    assert 4 <= int(told(result)) <= 8


def test_memory_runs_out_for_each_process(attack):
    result = attack("x = bytearray(300 << 20)", memory_bytes=200 << 20)
    assert result.reason == "out_of_memory"


@needs_groups
def test_memory_runs_out_for_all_processes_together(attack):
    result = attack(
        """
        import os, time
        children = []
        for _ in range(6):
            if (pid := os.fork()) == 0:
                block = bytearray(100 << 20)
                time.sleep(30)
                os._exit(0)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children[:1]]
        raise SystemExit(f"ended with {codes}")
        """,
        memory_bytes=200 << 20,
    )
    assert (result.outcome, result.reason) == ("policy_fail", "out_of_memory"), result


def test_the_disk_is_bounded_wherever_one_can_write(attack):
    mib = 1 << 20
    result = attack(
        """
        import os
        total = 0
        for folder in ("/workspace", "/tmp", "/dev/shm", "/dev", "/", "/usr", "/proc"):
            for number in range(1000):
                try:
                    with open(f"{folder}/{number}", "wb") as file:
                        for _ in range(15):
                            total += file.write(bytes(1 << 20))
                            file.flush()
                except OSError:
                    break
        for number in range(1000):
            try:
                os.remove(f"/workspace/{number}")
            except OSError:
                break
        open("out", "w").write(str(total))
        """,
        workspace_bytes=32 * mib,
        cpu_seconds=20,
    )
    assert 20 * mib < int(told(result)) <= (32 + 16 + 16 + 7) * mib


def test_files_without_number_end(attack):
    result = attack(
        """
        made = 0
        try:
            while made < 100_000:
                open(f"file {made}", "w").close()
                made += 1
        except OSError:
            pass
        import os
        os.remove("file 0")
        open("out", "w").write(str(made))
        """,
        cpu_seconds=20,
    )
    assert int(told(result)) < 20_000  # one for each 4 KiB of the workspace


def test_out_of_memory_the_kernel_takes_the_sandbox_first(attack):
    result = attack(
        "open('out', 'w').write(open('/proc/self/oom_score_adj').read().strip())"
    )
    assert int(told(result)) > int(Path("/proc/self/oom_score_adj").read_text())


def test_descriptors_run_out_for_it_alone(attack):
    result = attack(
        """
        import os
        held = []
        try:
            while len(held) < 100_000:
                held += os.pipe()
        except OSError:
            pass
        for descriptor in held[:8]:
            os.close(descriptor)
        open("out", "w").write(str(len(held)))
        """
    )
    assert 100 < int(told(result)) < 4096


def test_a_file_with_holes_is_no_larger_than_any(attack):
    result = attack("open('out', 'wb').truncate(10 << 30)")
    assert result.outcome == "policy_fail"
    assert result.reason in ("nonzero_exit", "artifact_too_large")
