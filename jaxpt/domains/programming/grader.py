# Runs in the grader's sandbox, on outputs.json alone.
import json


def same(a, b):
    """Equal in type and value, all the way down: True is not 1."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def grade(artifacts, payload):
    inputs, expected = payload["inputs"], payload["expected"]

    def verdict(passed, why):
        return {
            "components": {
                "tests": float(passed == len(expected)),
                "fraction": passed / len(expected),
            },
            "why": why,
        }

    try:
        outputs = json.loads(artifacts["outputs.json"])
    except ValueError:
        return verdict(0, "outputs.json is not JSON")
    if not isinstance(outputs, list) or len(outputs) != len(expected):
        return verdict(0, "outputs.json does not hold one result for each test")
    passed, first_failure = 0, ""
    for value, output, want in zip(inputs, outputs, expected):
        good = isinstance(output, dict) and "value" in output
        if good and same(output["value"], want):
            passed += 1
        elif not first_failure:
            got = output.get("value") if good else None
            said = str(output.get("error")) if isinstance(output, dict) else "nothing"
            first_failure = (
                f"f({value!r}) gave {got!r}, expected {want!r}"
                if good
                else f"f({value!r}): {said}"
            )[:300]
    why = f"{passed}/{len(expected)} tests passed"
    return verdict(passed, f"{why}; {first_failure}" if first_failure else why)
