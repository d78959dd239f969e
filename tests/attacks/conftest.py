"""Each attack runs on each backend, beside an honest job that must be graded as ever."""

import os

import pytest

from sandbox.backends.backend import SandboxUnavailable
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from tests.attacks.arena import HONEST, PATIENCE, SECRET, job

# An engine without userns-remap has no user namespaces.
WAIVED = {"local": (), "docker": ("namespace.user", "grader.namespaces")}


@pytest.fixture(scope="session", params=["local", "docker"])
def backend(request):
    return request.param


@pytest.fixture(scope="session")
def pool(backend):
    os.environ["JAXPT_TEST_SECRET"] = SECRET
    try:
        pool = Pool(LocalWorkers(2, backend=backend), waive=WAIVED[backend])
    except SandboxUnavailable as error:
        pytest.skip(f"no {backend} sandboxes here: {error}")
    finally:
        del os.environ["JAXPT_TEST_SECRET"]
    with pool:
        yield pool


@pytest.fixture
def attack(pool, request):
    """Runs a hostile program beside an honest one and returns what came of it."""

    def attack(code, **limits):
        name = request.node.name
        pids = pool.workers.pids
        hostile = pool.submit(job(f"{name} hostile", code, **limits))
        beside = pool.submit(job(f"{name} beside", HONEST))
        result = hostile.result(PATIENCE)
        after = pool.submit(job(f"{name} after", HONEST))
        for honest in (beside.result(PATIENCE), after.result(PATIENCE)):
            assert (honest.outcome, honest.attempts) == ("ok", 1)
            assert honest.verdict["components"] == {"right": 1.0}
        # It was the program's doing, so it is not tried again, and no worker suffered.
        assert result.attempts == 1
        assert set(pids) <= set(pool.workers.pids)
        return result

    return attack
