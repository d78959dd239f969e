# Runs in the grader's sandbox, on completion.txt alone. The domain makes its datasets by
# this file too, so that both have the same ones.
import ast
import decimal
import functools
import hashlib
import json
import os
import re
import resource
import signal
import sys
import warnings

CHECKED_SECONDS = 5  # of processor time, to check one answer

# What is there in the mathematics that models write. Sympy's parser evaluates a text as
# Python, in which names, attributes and strings reach everything else.
_NAMES = """
    Abs E I acos acosh asin asinh atan atanh cos cosh cot coth csc exp log pi sec sin sinh
    sqrt tan tanh
""".split()  # noqa: SIM905
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
# Puzzles whose rule looks for digits, and so overlooks what is spelled otherwise: 0x18.
_SUMS_ONLY = ("countdown", "puzzle24")
# Their rules evaluate nothing but the question.
_EVALUATES_ITS_OWN = ("bitwise_arithmetic",)


def normalized(text):
    """Text as it is compared: without differences of case and of white space."""
    return " ".join(text.split()).casefold()


def answer(completion, has_lines=False):
    """What follows the last `Answer:` that begins a line; None if there is no answer.

    It must be all of the last line that isn't empty, unless it may have several lines.
    """
    if has_lines:
        *_, last = [None, *re.finditer(r"(?im)^[^\S\n]*answer:", completion)]
        return (completion[last.end() :].strip() or None) if last else None
    lines = [line.strip() for line in completion.split("\n") if line.strip()]
    found = re.fullmatch(r"answer:(.*)", lines[-1], re.IGNORECASE) if lines else None
    return (found.group(1).strip() or None) if found else None


def configuration(name, settings, level, size):
    """A dataset's configuration: its curriculum's at a level, or these settings (JSON)."""
    with warnings.catch_warnings():
        # A package that it imports has invalid comparisons in its source.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym import factory
    if name not in factory.DATASETS:
        raise ValueError("it is not registered in reasoning-gym")
    fixed = {"seed": 0, "size": size}
    if level is None:
        made = factory.DATASETS[name][1](**fixed, **json.loads(settings))
    else:
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        made = curriculum.generate_configuration(fixed)
    if hasattr(made, "validate"):
        made.validate()
    return made


@functools.lru_cache(maxsize=1024)
def dataset(name, settings, level, size):
    """The dataset of this configuration; kept, as some read large files."""
    made = configuration(name, settings, level, size)
    from reasoning_gym import factory

    return factory.DATASETS[name][0](config=made)


def entry(name, settings, level, size, number):
    """A question of a dataset, with all that is known of it."""
    # Some set the precision of every decimal that comes after them.
    with decimal.localcontext(decimal.Context()):
        return dataset(name, settings, level, size)[number]


def digest(question):
    return hashlib.sha256(question.encode(errors="replace")).hexdigest()


def grade(artifacts, payload):
    text = artifacts["completion.txt"].decode(errors="replace").replace("\r\n", "\n")
    given = answer(text, payload["has_lines"])
    if given is None:
        wanted = "there is no" if payload["has_lines"] else "the last line is no"
        correct, why = 0.0, f"{wanted} 'Answer: X'"
    else:
        judge = _by_rule if "rule" in payload else _by_text
        correct, said = judge(given, payload)
        why = f"answered {given[:200]!r}, {said}"
    return {
        "components": {"correct": correct, "format": float(given is not None)},
        "why": why,
    }


def _by_text(given, payload):
    if normalized(given) == normalized(payload["expected"]):
        return 1.0, "right"
    return 0.0, f"expected {payload['expected'][:200]!r}"


def _by_rule(given, payload):
    """The value of the dataset's own `score_answer` for this answer, and what it means."""
    _find_packages(payload["packages"])
    rule = payload["rule"]
    made_by = (rule["dataset"], rule["settings"], rule["level"], rule["size"])
    data, asked = dataset(*made_by), entry(*made_by, rule["number"])
    if digest(asked["question"]) != rule["digest"]:
        raise RuntimeError(
            f"{rule['dataset']!r} asks another question here than where the task was made: "
            f"{asked['question']!r:.200}. Both need the same reasoning-gym."
        )
    # In Python's numbers neither is different from any other by more than a tolerance.
    if _not_finite(given) and not _not_finite(payload["expected"]):
        return 0.0, "which is no number"
    value, said = _apart(lambda: _score(data, asked, given, payload["expected"]))
    example = f"one right answer is {payload['expected'][:200]!r}"
    return value, said or ("right" if value == 1 else f"{value:g}; {example}")


def _find_packages(folder):
    if "reasoning_gym" in sys.modules:
        return
    if not os.path.isdir(os.path.join(folder, "reasoning_gym")):
        raise RuntimeError(
            f"The grader's sandbox has no reasoning-gym at {folder!r}. Show it that "
            "folder: LocalWorkers(options=reasoning.shown()), and in gin "
            "local_workers.LocalWorkers.options = @reasoning.shown()"
        )
    # Numpy would start a thread for each of the machine's processors.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path.append(folder)


def _not_finite(text):
    return re.search(r"(?i)\bs?(nan|inf|infinity)j?\b", text)


def _apart(score):
    """What `score` returns, run in a fork that may take CHECKED_SECONDS.

    A model writes 9**9**9 sooner or later: to give up on that is its failure, not ours.
    Only time on a processor counts, so a slow machine fails nobody.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limit = (CHECKED_SECONDS, CHECKED_SECONDS + 1)
            resource.setrlimit(resource.RLIMIT_CPU, limit)
            os.write(write, json.dumps(score()).encode())
        except BaseException as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}"[:999]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        reply = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGXCPU:
        return 0.0, f"which {CHECKED_SECONDS} s were not enough to check"
    reply = json.loads(reply) if code == 0 else f"exit code {code}"
    if isinstance(reply, str):
        raise RuntimeError(f"The rule does not work: {reply}")
    return reply


def _score(data, asked, given, expected):
    _take_the_fangs(data)
    try:
        value = float(data.score_answer(given, asked))
    except Exception as error:
        # A rule may choke on what a model wrote; one that chokes on the right answer is
        # broken.
        data.score_answer(expected, asked)
        return 0.0, f"which can't be read: {type(error).__name__}: {error}"[:300]
    if type(data).__module__.endswith(".puzzle24") and value == 1:
        # The rule only counts the numbers, so that one answer would do for every question.
        used = sorted(int(number) for number in re.findall(r"\d+", given))
        if used != sorted(asked["metadata"]["numbers"]):
            return 0.0, "which uses other numbers"
    value = min(max(value, 0.0), 1.0)
    return (1.0 if value > 1 - 1e-9 else value), ""


def _take_the_fangs(data):
    """Rules evaluate what the model wrote as Python; from here on, only what can't hurt."""
    module = sys.modules[type(data).__module__]
    name = module.__name__.rpartition(".")[2]
    if name not in _EVALUATES_ITS_OWN:
        vars(module)["eval"] = ast.literal_eval
    sympy = sys.modules.get("sympy")
    if sympy is None:
        return
    parse = sympy.parse_expr
    sums_only = name in _SUMS_ONLY

    def checked(text, *args, **kwargs):
        _check_expression(text, sums_only)
        return parse(text, *args, **kwargs)

    vars(sympy)["parse_expr"] = checked
    if getattr(module, "parse_expr", None) is parse:
        vars(module)["parse_expr"] = checked


def _check_expression(text, sums_only):
    """Raises ValueError unless the text is arithmetic: of whole numbers only, or of any,
    of variables of one letter and of well-known functions.
    """
    if not re.fullmatch(r"[0-9+\-*/() ]*" if sums_only else r"[\w+\-*/(). ]*", text):
        raise ValueError("other signs than those of an expression")
    tree = ast.parse(text.strip(), mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            fine = node.id in _NAMES or (len(node.id) == 1 and id(node) not in called)
        elif isinstance(node, ast.Call):
            fine = isinstance(node.func, ast.Name) and not node.keywords
        elif isinstance(node, ast.Pow):
            fine = not sums_only
        else:
            fine = isinstance(node, (*_NODES, ast.Load))
        if not fine:
            raise ValueError(f"{ast.dump(node)[:80]} is no part of an expression")
