# Runs in the grader's sandbox, on completion.txt alone.
import re


def normalized(text):
    """Text as it is compared: without differences of case and of white space."""
    return " ".join(text.split()).casefold()


def answer(completion):
    """What the last line that isn't empty gives as the answer; None if it gives none."""
    lines = [line.strip() for line in completion.split("\n") if line.strip()]
    found = re.fullmatch(r"answer:(.*)", lines[-1], re.IGNORECASE) if lines else None
    return (found.group(1).strip() or None) if found else None


def grade(artifacts, payload):
    given = answer(artifacts["completion.txt"].decode(errors="replace"))
    expected = payload["expected"]
    correct = given is not None and normalized(given) == normalized(expected)
    if given is None:
        why = "the last line is no 'Answer: X'"
    else:
        said = "right" if correct else f"expected {expected[:200]!r}"
        why = f"answered {given[:200]!r}, {said}"
    return {
        "components": {"correct": float(correct), "format": float(given is not None)},
        "why": why,
    }
