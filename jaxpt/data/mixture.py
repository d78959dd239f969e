"""Which task comes next: prompts from a mixture of domains by (split, seed, index)."""

import dataclasses
import random

from jaxpt.data.tokenizer import Tokenizer
from jaxpt.domains.domain import Domain, Task
from jaxpt.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Domains and their shares of the prompts (equal by default)."""

    domains: tuple[Domain, ...]
    ratios: tuple[float, ...] = ()

    def __post_init__(self):
        if not self.domains:
            raise ValueError("Mixture.domains is empty: name at least one domain.")
        names = [domain.name for domain in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"Mixture.domains {names} must have different names.")
        if self.ratios and len(self.ratios) != len(self.domains):
            raise ValueError(
                f"Mixture has {len(self.domains)} domains and {len(self.ratios)} "
                "ratios; give one for each domain, or none for equal shares."
            )
        if self.ratios and (min(self.ratios) < 0 or sum(self.ratios) <= 0):
            raise ValueError(f"Mixture.ratios {self.ratios} must be shares >= 0.")

    def domain(self, name: str) -> Domain:
        return next(domain for domain in self.domains if domain.name == name)

    def task(self, *, split: str, seed: int, index: int) -> tuple[Domain, Task]:
        """The task number `index` of a split, and its domain."""
        chooser = random.Random(f"mixture/{split}/{seed}/{index}")
        ratios = self.ratios or (1.0,) * len(self.domains)
        (domain,) = chooser.choices(self.domains, ratios)
        return domain, domain.task(split, seed, index)

    def draw(
        self,
        tokenizer: Tokenizer,
        *,
        split: str,
        seed: int,
        index: int,
        max_length: int,
    ) -> Prompt:
        """The prompt number `index` of a split; the same for the same arguments.

        Raises:
          ValueError: the prompt has more than `max_length` tokens.
        """
        domain, task = self.task(split=split, seed=seed, index=index)
        tokens = tuple(tokenizer.encode_chat(task.messages))
        if len(tokens) > max_length:
            raise ValueError(
                f"The prompt of {task.task_id} has {len(tokens)} tokens, over "
                f"max_prompt_length={max_length}; raise it."
            )
        return Prompt(prompt_id=task.task_id, domain=domain.name, tokens=tokens, task=task)
