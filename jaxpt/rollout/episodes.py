"""From prompts to trajectories: sample groups, let every episode run as it ends, collect.

The steps, in the order of one call of `Sampler.rollout`: pad the prompts, open the callback
queue, run the jitted decode loop (episodes leave it and start in their sandboxes), wait for
the outcomes, cut the samples into trajectories.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpt import mesh as mesh_lib
from jaxpt.base import Base
from jaxpt.data.mixture import Mixture
from jaxpt.inference.engine import generate, pad_prompts
from jaxpt.inference.sampling import SamplingConfig
from jaxpt.rewards import grade
from jaxpt.rewards.callback_queue import CallbackQueue, then
from jaxpt.types import Outcome, Prompt, Trajectory
from sandbox.pool import Pool

MakePool = Callable[[], Pool]
Clock = dict[str, float]  # seconds by phase, added up


@contextlib.contextmanager
def timed(clock: Clock, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        clock[phase] = clock.get(phase, 0.0) + time.perf_counter() - start


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The shape of one call: every batch is padded to it, so it compiles once.

    num_prompts: prompts in a batch; group_size: completions of each.
    max_prompt_length, max_new_tokens: in tokens.
    """

    num_prompts: int
    group_size: int
    max_prompt_length: int
    max_new_tokens: int
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self):
        for name in (
            "num_prompts",
            "group_size",
            "max_prompt_length",
            "max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """What sampling needs beside the weights; `rollout` is the only thing it does."""

    base: Base
    mixture: Mixture
    queue: CallbackQueue
    pool: Pool

    def rollout(
        self,
        params: Any,
        prompts: Sequence[Prompt],
        key: jax.Array,
        config: RolloutConfig,
        *,
        episode_id: str,
        clock: Clock,
        limits: Sequence[int] = (),
        on_sampled: Callable[[], None] = lambda: None,
    ) -> list[list[Trajectory]]:
        """The trajectories of each prompt's group, in order; the key is consumed.

        limits: the most new tokens of each prompt's completions; by default the config's.
        episode_id: with the row's number it names each sandbox job, so it must be new.
        clock: gets the seconds of `sample` and of `reward` (waiting after sampling).
        """
        G = config.group_size
        tokens, lengths = pad_prompts(
            [prompt.tokens for prompt in prompts],
            num_prompts=config.num_prompts,
            length=config.max_prompt_length,
            pad_id=self.base.tokenizer.pad_id,
        )
        temperatures = np.full(config.num_prompts, config.sampling.temperature, np.float32)
        most = np.full(config.num_prompts, config.max_new_tokens, np.int32)
        most[: len(limits)] = limits

        def submit(row: int, tokens: np.ndarray):
            return self._submit(prompts[row // G], tokens, f"{episode_id}/{row}")

        self.pool.wait_for_room()
        self.queue.open(list(range(len(prompts) * G)), submit)
        with timed(clock, "sample"):
            sharding = mesh_lib.named_sharding(self.base.mesh, ("batch",))
            samples = generate(
                params,
                jax.device_put(tokens, sharding),
                jax.device_put(lengths, sharding),
                jax.device_put(temperatures, sharding),
                key,
                config=self.base.model,
                mesh=self.base.mesh,
                top_k=config.sampling.top_k,
                top_p=config.sampling.top_p,
                group_size=G,
                max_new_tokens=config.max_new_tokens,
                eos_id=self.base.tokenizer.eos_id,
                pad_id=self.base.tokenizer.pad_id,
                limits=jax.device_put(most, sharding),
                on_finished=self.queue.on_finished,
            )
            samples = jax.device_get(samples)
        on_sampled()
        with timed(clock, "reward"):
            outcomes = self.queue.collect()
        return [
            [self._trajectory(prompt, samples, p, g, outcomes[p * G + g]) for g in range(G)]
            for p, prompt in enumerate(prompts)
        ]

    def _submit(self, prompt: Prompt, tokens: np.ndarray, job_id: str):
        domain = self.mixture.domain(prompt.domain)
        finished = bool(tokens[-1] == self.base.tokenizer.eos_id)
        completion = self.base.tokenizer.decode([int(token) for token in tokens])
        job = domain.job(prompt.task, completion, job_id)
        return then(
            self.pool.submit(job),
            functools.partial(grade.outcome, weights=domain.weights, finished=finished),
        )

    def _trajectory(
        self, prompt: Prompt, samples: Any, p: int, g: int, outcome: Outcome
    ) -> Trajectory:
        length = int(samples.lengths[p, g])
        return Trajectory(
            prompt=prompt,
            tokens=samples.tokens[p, g, :length],
            logprobs=samples.logprobs[p, g, :length],
            processed_logprobs=samples.processed_logprobs[p, g, :length],
            finished=bool(samples.finished[p, g]),
            outcome=outcome,
        )


@contextlib.contextmanager
def open_sampler(
    base: Base, mixture: Mixture, make_pool: MakePool = Pool
) -> Iterator[Sampler]:
    """A sampler with a pool of sandboxes of its own, which ends with it."""
    with make_pool() as pool, CallbackQueue(base.mesh) as queue:
        yield Sampler(base=base, mixture=mixture, queue=queue, pool=pool)
