"""evalplus's check of one solution, behind the lines of `sandbox_driver`.

It grades and has no sessions: the one request is {"do": "grade", ...}.
"""

import json
import os
import sys

from evalplus.eval import untrusted_check  # pyright: ignore[reportMissingImports]


def grade(request: dict) -> dict:
    inputs = request["inputs"]
    status, passed = untrusted_check(
        "none",
        request["code"],
        [[value] for value in inputs],
        request["entry_point"],
        expected=request["expected"],
        atol=request["tolerance"],
        ref_time=[0.1] * len(inputs),
    )
    return {"score": float(status == "pass"), "status": status, "passed": sum(passed)}


def main() -> None:
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        print(json.dumps({"ready": True}), file=output, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            reply = grade(request) | {"number": request["number"]}
            print(json.dumps(reply), file=output, flush=True)


if __name__ == "__main__":
    main()
