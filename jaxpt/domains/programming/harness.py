# Runs in the agent's sandbox: calls `f` of solution.py on each input and writes what it
# gave as JSON. It imports nothing that Python has not loaded already, since starting costs
# more than running; and only values of exact built-in types are written, so that no object
# of the candidate's own ever meets the grader.
from _json import encode_basestring_ascii as quote


def dumps(value, depth=0):
    kind = type(value)
    if depth > 20:
        raise ValueError("nested too deeply")
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return int.__repr__(value)
    if kind is float and value - value == 0.0:
        return float.__repr__(value)
    if kind is str:
        return quote(value)
    if kind is list:
        return "[" + ",".join([dumps(item, depth + 1) for item in value]) + "]"
    raise ValueError("gave a " + kind.__name__)


def describe(error):
    return type(error).__name__ + ": " + str(error)[:200]


def outcomes(inputs):
    try:
        with open("solution.py", encoding="utf-8", errors="surrogateescape") as file:
            source = file.read()
        space: dict = {"__name__": "solution"}
        exec(compile(source, "solution.py", "exec"), space)
        function = space["f"]
    except BaseException as error:
        return ['{"error":' + quote(describe(error)) + "}"] * len(inputs)
    results = []
    for value in inputs:
        try:
            results.append('{"value":' + dumps(function(value)) + "}")
        except BaseException as error:
            try:
                results.append('{"error":' + quote(describe(error)) + "}")
            except BaseException:
                results.append('{"error":"an error that can not be described"}')
    return results


def main():
    with open("inputs.txt") as file:
        inputs = eval(file.read(), {"__builtins__": {}})
    results = outcomes(inputs)
    with open("outputs.json", "w") as file:
        file.write("[" + ",".join(results) + "]")


main()
