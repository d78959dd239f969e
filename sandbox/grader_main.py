"""Runs inside a grader's sandbox: requests as JSON lines on stdin, verdicts on fd 3.

argv[1] is the grading program. What it prints goes nowhere; only its return value
counts. A reply carries its request's number, so that none is taken for another's.
"""

import base64
import json
import os
import sys


def _load(path: str):
    """The program's `grade`; if there is none, a function that raises why."""
    namespace = {"__name__": "grader"}
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), "grader.py", "exec"), namespace)
        return namespace["grade"]
    except Exception as error:
        reason = error

        def broken(artifacts, payload):
            raise reason

        return broken


def _reply(grade, request: dict) -> dict:
    artifacts = {
        name: base64.b64decode(data) for name, data in request["artifacts"].items()
    }
    try:
        verdict = grade(artifacts, request["payload"])
    except Exception:
        import traceback  # here, as it costs as much as the rest of the start

        return {"raised": traceback.format_exc()[-4000:]}
    try:
        json.dumps(verdict, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"malformed": f"{error}: {verdict!r:.200}"}
    return {"verdict": verdict}


def main() -> None:
    os.set_inheritable(3, False)
    verdicts = os.fdopen(3, "w", encoding="utf-8")
    grade = _load(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        reply = {"number": request["number"], **_reply(grade, request)}
        verdicts.write(json.dumps(reply) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
