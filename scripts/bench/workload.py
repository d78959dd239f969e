"""The work that every system is timed on, and the clock that times it alike.

One GRPO step: 4 prompts x 8 samples x 64 new tokens of a dense Qwen3-shaped model of
854,400 parameters (4 layers, width 128, feed-forward 384, 4 query heads and 2 key-value
heads of 32, vocabulary 260, untied), float32 on a CPU, Adam 1e-3, no KL, and as reward the
share of the letter `a`. A byte is the token of its number + 4; pad 0, bos 1, eos 2.

Imports nothing but the standard library: it is also read in the peers' environments.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

GROUP_SIZE, NUM_PROMPTS, MAX_NEW_TOKENS, MAX_PROMPT_LENGTH = 8, 4, 64, 32
LEARNING_RATE = 1e-3
PAD_ID, BOS_ID, EOS_ID, FIRST_BYTE_ID, VOCAB_SIZE = 0, 1, 2, 4, 260
TARGET = "a"
PROMPTS = tuple(f"say letter {i}" for i in range(NUM_PROMPTS))
COLD_STEPS = 2  # the first ones compile and are left out of the medians


class Clock:
    """Notes each step at the moment when its rewards are asked for.

    A step is the time from one such moment to the next: it learns from a batch and samples
    the next one, whatever the system does in between.
    """

    def __init__(self):
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.second_rewards_at = 0.0  # since the epoch
        self.start = time.perf_counter()

    def begin(self) -> None:
        """The libraries are imported and the model is made; training starts now."""
        self.start = time.perf_counter()

    def step(self, rewards: Sequence[float], tokens: int) -> None:
        """A batch was sampled: its rewards, and its number of completion tokens."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.rewards.append(round(statistics.fmean(rewards), 4))
        self.tokens.append(tokens)
        if len(self.wall) == 2:
            self.second_rewards_at = time.time()

    def figures(self, system: str) -> dict:
        """Seconds; medians over the steps after the first COLD_STEPS.

        first_step_s: from `begin` to the first rewards: the first sampling.
        first_two_steps_s: from `begin` to the second ones: sampling twice, learning once.
        Both include compilation.
        """
        step = statistics.median(_differences(self.wall)[COLD_STEPS:])
        tokens = statistics.median(self.tokens[COLD_STEPS + 1 :])
        return {
            "system": system,
            "step_s": step,
            "cpu_step_s": statistics.median(_differences(self.cpu)[COLD_STEPS:]),
            "first_step_s": self.wall[0] - self.start,
            "first_two_steps_s": self.wall[1] - self.start,
            "completion_tokens_per_s": tokens / step,
            "rewards": self.rewards,
            "second_rewards_at": self.second_rewards_at,
        }


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def arguments(description: str) -> argparse.Namespace:
    """The options that the script of every system has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=12, help="steps to time (12)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def report(figures: dict, path: Path | None) -> None:
    text = json.dumps(figures)
    print(text)
    if path:
        path.write_text(text + "\n")


def share_of_target(text: str) -> float:
    return text.count(TARGET) / max(1, len(text))
