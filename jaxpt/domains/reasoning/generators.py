"""Every generator of `reasoning-gym` as a domain of its own, with its curriculum."""

import logging
from collections.abc import Sequence

from jaxpt.domains.domain import SPLITS
from jaxpt.domains.reasoning import Reasoning
from jaxpt.domains.reasoning.dataset import Dataset, registry

# Why no domain can be made of these; found by trying in reasoning-gym 0.1.25.
_SETS = "its questions depend on PYTHONHASHSEED, so a run could not be repeated"
LEFT_OUT = {
    "boxnet": "gives no worked solution",
    "coin_flip": "gives the answer 0 full marks",
    "codeio": "keeps one level's programs for all, and runs them here",
    "composite": "is a mixture of others",
    "isomorphic_strings": _SETS,
    "polynomial_multiplication": _SETS,
    "ransom_note": _SETS,
    "rush_hour": "gives no worked solution",
    "word_ladder": _SETS,
}


def every_generator(
    *,
    max_question_chars: int | None = None,
    exclude: Sequence[str] = (),
    num_examples: int = 0,
    weights: dict[str, float] | None = None,
) -> tuple[Reasoning, ...]:
    """One domain for each generator, named as there; those left out are logged with why.

    max_question_chars: generators are left out most of whose easiest questions are longer;
      so are levels, and of the others the questions that are longer.
    exclude: names of generators that are not wanted.
    num_examples, weights: see `Reasoning`.

    Raises:
      ValueError: `exclude` names what is no generator; or reasoning-gym is missing.
    """
    names = generator_names()
    if unknown := sorted(set(exclude) - set(names)):
        raise ValueError(f"exclude names {unknown}; generators are {names}.")
    domains: list[Reasoning] = []
    left_out: dict[str, list[str]] = {}  # names by the reason
    for name in names:
        if name in exclude:
            continue
        if name in LEFT_OUT:
            left_out.setdefault(LEFT_OUT[name], []).append(name)
            continue
        dataset = Dataset(name=name, max_question_chars=max_question_chars)
        try:
            made = Reasoning(
                datasets=(dataset,),
                num_examples=num_examples,
                name=name,
                weights=weights or {"correct": 1.0},
            )
            for split in SPLITS:
                made.task(split, 0, 0)
        except ValueError as error:
            why = str(error).removeprefix(f"Dataset {name!r}").lstrip(": ")
            left_out.setdefault(why, []).append(name)
            continue
        domains.append(made)
    logging.warning(  # not to be missed: what is left out is not learnt
        "%d generators of reasoning-gym, %d levels in all; left out: %s",
        len(domains),
        sum(domain.levels for domain in domains),
        "; ".join(f"{', '.join(names)}: {why}" for why, names in left_out.items()),
    )
    return tuple(domains)


def generator_names() -> list[str]:
    """All that reasoning-gym has. Raises ValueError if it is missing."""
    return sorted(registry().DATASETS)
