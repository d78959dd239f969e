"""Records that cross to the workers: any that is valid travels, any other is named."""

import copy
import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.protocol import (
    OUTCOMES,
    Execution,
    Grading,
    Job,
    Limits,
    Output,
    ProtocolError,
    Result,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
# Names of one kind each, so that a file is never a folder too, nor given and read.
given_names = st.from_regex(r"given/[a-zé ]{1,8}", fullmatch=True)
file_names = st.from_regex(r"(sub/)?[a-z]{1,8}\.py", fullmatch=True)
read_names = st.from_regex(r"read/[a-z.]{1,6}x", fullmatch=True)
contents = st.binary(max_size=30)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
limits = st.builds(
    Limits,
    wall_seconds=st.floats(0.1, 100),
    cpu_seconds=st.integers(1, 100),
    memory_bytes=st.integers(1, 1 << 40),
    processes=st.integers(1, 100),
)
jobs = st.builds(
    Job,
    job_id=st.text(min_size=1, max_size=8),
    domain=st.text(max_size=8),
    execution=st.none()
    | st.builds(
        Execution,
        command=st.lists(words, min_size=1, max_size=3).map(tuple),
        files=st.dictionaries(file_names, contents, max_size=3),
        stdin=contents,
        artifacts=st.lists(read_names, max_size=3).map(tuple),
        limits=limits,
    ),
    grading=st.builds(Grading, program=words, payload=json_values, limits=limits),
    artifacts=st.dictionaries(given_names, contents, max_size=3),
)
outputs = st.builds(
    Output, head=contents, tail=contents, total_bytes=st.integers(0, 1 << 40)
)
results = st.builds(
    Result,
    job_id=st.text(max_size=8),
    outcome=st.sampled_from(OUTCOMES),
    reason=st.text(max_size=8),
    verdict=st.none() | st.dictionaries(st.text(max_size=3), json_values, max_size=3),
    exit_code=st.none() | st.integers(0, 255),
    stdout=outputs,
    stderr=outputs,
    attempts=st.integers(1, 5),
    seconds=st.dictionaries(st.text(max_size=5), st.floats(0, 100), max_size=3),
)


@given(record=jobs | results)
def test_every_record_survives_the_trip(record):
    line = record.to_json()
    assert "\n" not in line  # one record is one line
    assert type(record).from_json(line) == record


def full_job() -> dict:
    job = Job(
        job_id="a",
        domain="d",
        execution=Execution(
            command=("python", "x"), files={"x": b"1"}, stdin=b"2", artifacts=("y",)
        ),
        grading=Grading(program="p", payload=None),
        artifacts={"z": b"3"},
    )
    return json.loads(job.to_json())


def full_result() -> dict:
    result = Result(
        job_id="a", outcome="ok", reason="graded", exit_code=0, seconds={"queue": 1.0}
    )
    return json.loads(result.to_json())


def fields(value: dict, path=()) -> list[tuple]:
    """Paths of all fields of a record's JSON, but for those in values of any form."""
    found = []
    for key, inner in value.items():
        found.append((*path, key))
        if isinstance(inner, dict) and key not in ("payload", "verdict"):
            found += fields(inner, (*path, key))
    return found


def replaced(record: dict, path: tuple, change) -> str:
    record = copy.deepcopy(record)
    holder = record
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return json.dumps(record)


def put(holder: dict, key: str, *, value):
    holder[key] = value


CASES = [
    (kind, record, path)
    for kind, record in ((Job, full_job()), (Result, full_result()))
    for path in fields(record)
    if path[-1] != "payload"  # any JSON value will do
]


@pytest.mark.parametrize(("kind", "record", "path"), CASES)
def test_a_field_of_the_wrong_type_is_named(kind, record, path):
    # In a verdict any object will do.
    wrong_values = [True, [[]]] + ([] if path[-1] == "verdict" else [{"surprise": []}])
    for wrong in wrong_values:
        text = replaced(record, path, functools.partial(put, value=wrong))
        with pytest.raises(ProtocolError, match=path[-1]):
            kind.from_json(text)


@pytest.mark.parametrize("path", [(), ("execution",), ("grading", "limits")])
def test_an_unknown_field_is_named(path):
    text = replaced(full_job(), (*path, "surprise"), functools.partial(put, value=1))
    with pytest.raises(ProtocolError, match="surprise"):
        Job.from_json(text)


@pytest.mark.parametrize(
    "path", [("job_id",), ("grading",), ("execution", "files"), ("grading", "payload")]
)
def test_a_missing_field_is_named(path):
    text = replaced(full_job(), path, lambda holder, key: holder.pop(key))
    with pytest.raises(ProtocolError, match=path[-1]):
        Job.from_json(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "null", '{"job_id": NaN}', b"\xff\xfe", "[" * 100_000],
)
def test_what_is_no_record_is_refused(text):
    for kind in (Job, Result):
        with pytest.raises(ProtocolError, match=kind.__name__):
            kind.from_json(text)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "/a",
        "../a",
        "a/../../b",
        "a//b",
        "./a",
        "a/",
        "a\nb",
        "\0",
        "\ud800",
        "x" * 256,
    ],
)
def test_paths_stay_in_the_workspace(path):
    with pytest.raises(ProtocolError, match=r"Execution\.files"):
        Execution(command=("true",), files={path: b""})
    with pytest.raises(ProtocolError, match=r"Execution\.artifacts"):
        Execution(command=("true",), files={}, artifacts=(path,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": ()}, "command is empty"),
        ({"command": ("a\0b",)}, "without NUL"),
        ({"command": ("\ud800",)}, "UTF-8"),
        ({"command": ("sh", "-c", "x" * 100_000)}, "100004 bytes, more than 65536"),
        ({"files": {"a": b"", "a/b": b""}}, r"\['a'\] are files and folders"),
        ({"files": {f"{i}": b"" for i in range(2000)}}, "2000 files"),
        (
            {"files": {"a": b"x" * 5000}, "limits": Limits(workspace_bytes=8191)},
            "take 8192 bytes, more than Limits.workspace_bytes=8191",
        ),
    ],
)
def test_what_no_sandbox_can_run_is_refused_at_once(change, message):
    with pytest.raises(ProtocolError, match=message):
        Execution(**({"command": ("true",), "files": {}} | change))


@pytest.mark.parametrize("payload", [float("nan"), float("inf"), b"", {"a": {1}}])
def test_a_payload_is_a_json_value(payload):
    with pytest.raises(ProtocolError, match="payload"):
        Grading(program="", payload=payload)


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_seconds": 0},
        {"wall_seconds": float("inf")},
        {"wall_seconds": float("nan")},
        {"memory_bytes": -1},
        {"memory_bytes": 1e9},
        {"processes": True},
        {"file_bytes": "1"},
    ],
)
def test_limits_must_limit(change):
    (name,) = change
    with pytest.raises(ProtocolError, match=rf"Limits\.{name}="):
        Limits(**change)


def test_a_given_artifact_is_not_read_from_the_workspace():
    with pytest.raises(ProtocolError, match=r"both name \['out'\]"):
        Job(
            job_id="a",
            domain="d",
            execution=Execution(command=("true",), files={}, artifacts=("out",)),
            grading=Grading(program="", payload=None),
            artifacts={"out": b"mine"},
        )


def test_a_job_has_a_name_and_a_result_a_known_outcome():
    with pytest.raises(ProtocolError, match="job_id"):
        Job(
            job_id="",
            domain="d",
            execution=None,
            grading=Grading(program="", payload=None),
        )
    with pytest.raises(ProtocolError, match=r"Result\.outcome='fine'"):
        Result(job_id="a", outcome="fine", reason="graded")


def test_output_as_text_says_what_was_cut():
    assert Output(head=b"ab", tail=b"cd", total_bytes=4).text() == "abcd"
    cut = Output(head=b"a\xff", tail=b"z", total_bytes=10).text()
    assert cut == "a\ufffd\n[7 bytes cut]\nz"
