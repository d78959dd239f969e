"""Runs inside a grader's sandbox: requests as JSON lines on stdin, verdicts on fd 3.

argv[1] is the grading program. What it prints goes nowhere; only its return value counts.
"""

import base64
import json
import os
import sys
import traceback


def main() -> None:
    verdicts = os.fdopen(3, "w")
    namespace: dict = {"__name__": "grader"}
    with open(sys.argv[1]) as file:
        exec(compile(file.read(), "grader.py", "exec"), namespace)
    grade = namespace["grade"]
    for line in sys.stdin:
        request = json.loads(line)
        artifacts = {
            name: base64.b64decode(data) for name, data in request["artifacts"].items()
        }
        try:
            reply = {"verdict": grade(artifacts, request["payload"])}
            text = json.dumps(reply, allow_nan=False)
        except Exception:
            text = json.dumps({"error": traceback.format_exc()[-4000:]})
        verdicts.write(text + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
