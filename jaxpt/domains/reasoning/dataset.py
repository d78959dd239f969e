"""Datasets of `reasoning-gym`: how hard they can be made, and their questions by number."""

import dataclasses
import functools
import importlib.util
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpt.domains import domain
from jaxpt.domains.domain import HELDOUT, TRAIN
from jaxpt.domains.reasoning import grader

MOST_LEVELS = 6

# Datasets whose own `score_answer` only adds to the one right answer (other spellings of
# an integer, credit for a part), or takes any text for right: answers are compared as text.
# Read in reasoning-gym 0.1.25.
ONE_ANSWER = ("chain_sum", "game_of_life_halting", "products", "spell_backward")

# Where the worked solution is if it is not the answer.
_SOLUTIONS = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}

# Levels of curricula that are left out: a question takes more than half a second, or never
# comes (jugs, number_sequence, sokoban, tsumego); it has no worked solution (integration,
# rubiks_cube); or it is one of a few (game_of_life_halting, propositional_logic,
# tower_of_hanoi).
_NO_LEVELS = {
    "bf": (2,),
    "futoshiki": (3,),
    "game_of_life": (3,),
    "game_of_life_halting": (2, 3),
    "intermediate_integration": (4,),
    "jugs": (2, 3),
    "number_sequence": (1, 2, 3),
    "propositional_logic": (0,),
    "rubiks_cube": (1, 2, 3, 4),
    "sokoban": (0,),
    "tower_of_hanoi": (0,),
    "tsumego": (3,),
    "zebra_puzzles": (3, 4, 5),
}

_SIZE = 1 << 18  # questions of a dataset; a few datasets make a table of this length
_SIZES = {"acre": 1 << 11}  # of those that make all their questions at once
_MOST_DRAWS = 1000  # of questions, until one is of the wanted split
_PROBES = 4  # questions that a dataset is tried on before it is used


def registry() -> Any:
    """The module of reasoning-gym that knows all its datasets; slow to import at first.

    Raises:
      ValueError: reasoning-gym is missing.
    """
    try:
        with warnings.catch_warnings():
            # A package that it imports has invalid comparisons in its source.
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym import factory
    except ImportError as error:
        raise _missing(error) from error
    return factory


def site_packages() -> str:
    """The folder of this machine that has reasoning-gym and what it needs.

    Raises:
      ValueError: reasoning-gym is missing.
    """
    found = importlib.util.find_spec("reasoning_gym")
    if found is None or found.origin is None:
        raise _missing("it is not installed")
    return str(Path(found.origin).resolve().parents[1])


def shown() -> dict[str, Any]:
    """Options of `LocalWorkers` that show graders `site_packages()`, as rules need it."""
    return {"shown": [site_packages()]}


def split_of(question: str) -> str:
    """The split that a question is in; its case and spacing make no difference."""
    return HELDOUT if domain.is_held_out("".join(question.split()).casefold()) else TRAIN


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, an answer that is right, and where they come from.

    level: of the dataset's curriculum; None for one of settings.
    digest: of the text as the dataset gives it.
    """

    text: str
    answer: str
    level: int | None
    number: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset of `reasoning-gym`, by its name there, and how hard its questions are.

    settings: fields of the dataset's configuration, such as {"max_terms": 3}. Without any
      the dataset's curriculum, if it has one, sets them for each level.
    ratio: its share of the domain's tasks, relative to the others'.
    max_question_chars: longer questions are never drawn, and levels left out of which half
      are longer; None for any length.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ratio: float = 1.0
    max_question_chars: int | None = None

    def __post_init__(self):
        if taken := sorted({"seed", "size"} & set(self.settings)):
            raise ValueError(
                f"Dataset {self.name!r}: settings give {taken}, which have no effect: "
                "the domain numbers its tasks itself. Leave them out."
            )
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"Dataset {self.name!r}: ratio={self.ratio} must be positive.")
        if self.max_question_chars is not None and self.max_question_chars < 1:
            raise ValueError(
                f"Dataset {self.name!r}: max_question_chars={self.max_question_chars} must "
                "be 1 or more."
            )

    @functools.cached_property
    def settings_json(self) -> str:
        try:
            return json.dumps(dict(self.settings), sort_keys=True)
        except TypeError as error:
            raise ValueError(
                f"Dataset {self.name!r}: its settings must be JSON, as graders make the "
                f"dataset again in their sandbox: {error}."
            ) from error

    @property
    def size(self) -> int:
        """Questions that it has at each level."""
        return _SIZES.get(self.name, _SIZE)

    @functools.cached_property
    def levels(self) -> tuple[int | None, ...]:
        """Levels of its curriculum that can be asked, the easiest first.

        Only those whose configuration is another than the one before. (None,) if its
        settings are given, or it has no curriculum that works.

        Raises:
          ValueError: reasoning-gym is missing, or does not know the name or a setting, or
            all questions are too long.
        """
        factory = registry()
        levels: list[int | None] = []
        if not self.settings and factory.has_curriculum(self.name):
            curriculum = factory.create_curriculum(self.name)
            longest = max(len(each.levels) for each in curriculum.attributes.values())
            before = None
            for level in range(min(longest, MOST_LEVELS)):
                try:
                    here = self._configuration(level)
                except ValueError:
                    continue  # some curricula leave what their dataset allows
                if here != before and level not in _NO_LEVELS.get(self.name, ()):
                    levels.append(level)
                before = here
        if not levels:
            self._configuration(None)
            levels = [None]
        fitting = tuple(level for level in levels if self._fits(level))
        if not fitting:
            raise ValueError(
                f"Dataset {self.name!r}: at every level most questions are longer than "
                f"max_question_chars={self.max_question_chars}."
            )
        return fitting

    def _configuration(self, level: int | None) -> Any:
        try:
            return grader.configuration(self.name, self.settings_json, level, self.size)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"Dataset {self.name!r} with the settings {dict(self.settings)}: {error}."
            ) from error

    def _is_short(self, question: Question | None) -> bool:
        longest = self.max_question_chars or math.inf
        return question is not None and len(question.text) <= longest

    def _fits(self, level: int | None) -> bool:
        if self.max_question_chars is None:
            return True
        fitting, longer = 0, 0
        for number in _probes():
            if self._is_short(self.question(number, level)):
                fitting += 1
            else:
                longer += 1
            if max(fitting, longer) > _PROBES / 2:
                break  # long questions take long to make
        return fitting >= longer

    def question(self, number: int, level: int | None) -> Question | None:
        """The question with this number at a level of its curriculum.

        None if the dataset gives up: some search for a puzzle, and do not always find one.

        Raises:
          ValueError: there is no text for an answer.
        """
        number %= self.size
        try:
            entry = grader.entry(self.name, self.settings_json, level, self.size, number)
        except (ValueError, RuntimeError):
            return None
        answer = entry["answer"]
        if self.name in _SOLUTIONS:
            answer = _SOLUTIONS[self.name](entry["metadata"])
        if not isinstance(answer, str):
            raise ValueError(
                f"Dataset {self.name!r} answers one of its questions by {answer!r:.80}, "
                "but an answer must be text. Take another dataset."
            )
        asked = entry["question"]
        return Question(asked.strip(), answer.strip(), level, number, grader.digest(asked))

    @functools.cached_property
    def has_rule(self) -> bool:
        """Whether the dataset's own `score_answer` decides which answers are right."""
        from reasoning_gym.dataset import ProceduralDataset

        made = grader.dataset(self.name, self.settings_json, self.levels[0], self.size)
        own = type(made).score_answer is not ProceduralDataset.score_answer
        return own and self.name not in ONE_ANSWER

    def check(self) -> None:
        """Refuses a dataset that does not repeat itself."""
        first = [self.question(number, self.levels[0]) for number in _probes()]
        again = [self.question(number, self.levels[0]) for number in reversed(_probes())]
        if first != again[::-1]:
            raise ValueError(
                f"Dataset {self.name!r} gives another question when it is asked for the "
                "same number again, so a run could not be repeated. Take another dataset."
            )

    def draw(self, split: str, draw_id: str, level: int) -> Question:
        """The first question drawn that is in the split, not too long, and has an answer.

        level: of the domain; its hardest, if it has fewer.
        """
        own_level = self.levels[min(level, len(self.levels) - 1)]
        for attempt in range(_MOST_DRAWS):
            found = self.question(domain.digest(f"{draw_id}/{attempt}"), own_level)
            if found is None or not found.answer or not self._is_short(found):
                continue
            if split_of(found.text) == split:
                return found
        raise ValueError(
            f"Dataset {self.name!r} with the settings {dict(self.settings)} gave no "
            f"question of the {split} split in {_MOST_DRAWS} draws: it has too few "
            "different ones. Widen its settings."
        )


def _probes() -> list[int]:
    return [domain.digest(f"probe/{number}") for number in range(_PROBES)]


def _missing(error: object) -> ValueError:
    return ValueError(
        f"The reasoning domain needs reasoning-gym ({error}). "
        "Run: pip install -e '.[reasoning]' -c constraints.txt"
    )
