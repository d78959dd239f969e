#!/usr/bin/env python
"""Samples from a run's newest checkpoint: your own prompts, or held-out tasks, graded.

scripts/sample.py --workdir runs/quickstart
scripts/sample.py --workdir runs/quickstart --prompt "x is a number. add 3, then square it."
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--prompt", action="append", default=[], help="repeatable")
    parser.add_argument(
        "--tasks", type=int, default=4, help="held-out tasks to try, without --prompt"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    sys.path.insert(0, str(ROOT))
    from jaxpt import trained
    from sandbox.backends.backend import SandboxUnavailable

    try:
        model = trained.load(args.workdir)
        if args.prompt:
            completions = model.complete(
                args.prompt, temperature=args.temperature, seed=args.seed
            )
            for prompt, completion in zip(args.prompt, completions, strict=True):
                print(f"{prompt}\n\n{completion}\n")
        else:
            try_tasks(model, args)
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def try_tasks(model, args: argparse.Namespace) -> None:
    """Prints held-out tasks, what the model answers, and the sandbox's verdicts."""
    import jax

    from jaxpt import evaluate
    from jaxpt.inference.sampling import SamplingConfig
    from jaxpt.rollout import episodes

    rollout = model.configuration["reinforcement"].rollout
    with episodes.open_sampler(model.base, model.configuration["mixture"]) as sampler:
        _, groups = evaluate.evaluate(
            sampler,
            model.state.params,
            jax.random.key(args.seed),
            evaluate.EvaluationConfig(
                num_tasks=args.tasks,
                batch_size=args.tasks,
                seed=args.seed,
                sampling=SamplingConfig(temperature=args.temperature),
            ),
            greedy=args.temperature == 0,
            max_prompt_length=rollout.max_prompt_length,
            max_new_tokens=rollout.max_new_tokens,
            name="sample",
            clock={},
        )
    for (trajectory,) in groups:
        for message in trajectory.prompt.task.messages:
            print(message["content"])
        print(f"\n{model.base.tokenizer.decode(trajectory.tokens.tolist())}")
        outcome = trajectory.outcome
        reward = f", reward {outcome.reward.total:g}" if outcome.reward else ""
        print(f"-> {outcome.kind}{reward}: {outcome.why}\n")


if __name__ == "__main__":
    sys.exit(main())
