"""An incident replayed: sandboxes fail for nine of ten episodes. What is learnt?

    python scripts/bench/incident.py --markdown docs/algorithms.md --plot docs/incident.png

Once 91.6% of a run's rollouts were scored 0 because its infrastructure failed. Here the
same episodes are learnt from again and again, each time with other nine of ten of them
failed: by our rule, that they never were, and by the naive one, that they earned 0. Both
gradients are compared to that of all episodes. `spread` is how far one gradient is from the
mean of its kind, relative to the clean one's length: the sampling error of a tenth of the
episodes. `bias` is how far that mean is from the clean gradient, in standard errors of the
mean: about 1 for what is right on average. `cosine` is that of the mean's angle to the
clean gradient, `length` the mean's, relative to it.

The exit code is 1 if our rule is biased, or the naive one is not found to be.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import jax
import numpy as np
import optax
from peers.sandbox_report import table, write_section

from jaxpt import learner
from jaxpt import mesh as mesh_lib
from jaxpt.base import Base
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import DenseConfig, ModelConfig
from jaxpt.rl import advantages, aggregation, losses
from jaxpt.rl.algorithm import Algorithm
from jaxpt.types import Outcome, Prompt, Reward, Trajectory

VOCAB, LENGTH, GROUPS, SIZE = 32, 8, 64, 8
FAILED = 0.9
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    feed_forward=DenseConfig(intermediate_size=32),
    max_positions=64,
)
POLICY_LOSS = losses.PolicyLoss(objective=losses.unclipped)
ALGORITHMS = {
    "REINFORCE": Algorithm(
        advantage=advantages.returns,
        loss=POLICY_LOSS,
        aggregation=aggregation.sequence_sum,
    ),
    "REINFORCE++": Algorithm(
        advantage=functools.partial(advantages.whitened, advantage=advantages.returns),
        loss=POLICY_LOSS,
        aggregation=aggregation.token_mean,
    ),
}
Group = list[Trajectory]


def episodes(rng: np.random.Generator) -> list[Group]:
    """Random tokens; an episode earns 1 if most of them are even."""
    groups = []
    for number in range(GROUPS):
        prompt = Prompt(
            prompt_id=f"p{number}",
            domain="parity",
            tokens=tuple(rng.integers(3, VOCAB, 4).tolist()),
            task=None,
        )
        group = []
        for _ in range(SIZE):
            tokens = rng.integers(3, VOCAB, LENGTH).astype(np.int32)
            earned = float(np.mean(tokens % 2 == 0) > 0.5)
            group.append(
                Trajectory(
                    prompt=prompt,
                    tokens=tokens,
                    logprobs=np.zeros(LENGTH, np.float32),
                    processed_logprobs=np.zeros(LENGTH, np.float32),
                    finished=True,
                    outcome=ended("ok", earned),
                )
            )
        groups.append(group)
    return groups


def ended(kind: str, reward: float | None) -> Outcome:
    earned = None if reward is None else Reward(components={}, total=reward)
    return Outcome(kind=kind, reason="made up", why="", reward=earned)


def failing(groups: list[Group], is_failed: np.ndarray, outcome: Outcome) -> list[Group]:
    """The same episodes, those that failed with this outcome."""
    return [
        [dataclasses.replace(e, outcome=outcome) if f else e for e, f in zip(group, row)]
        for group, row in zip(groups, is_failed)
    ]


def gradients(name: str, groups: list[Group], draws: int) -> dict[str, Any]:
    """Of all episodes, and of `draws` incidents by either rule; vectors."""
    mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(), jax.devices()[:1])
    specs = transformer.param_specs(MODEL)
    base: Any = Base(
        tokenizer=None,  # type: ignore[arg-type]
        model=MODEL,
        mesh=mesh,
        params=lambda seed: params_lib.init_params(seed, specs, mesh),
    )
    config = learner.LearningConfig(
        algorithm=ALGORITHMS[name],
        optimizer=optax.sgd(1.0, momentum=0.9),  # whose moments are the first gradient
        rows=learner.Rows(length=128, micro_batch=8),
        recompute_old_logprobs=True,
    )
    learn = learner.Learner(
        base,
        config,
        num_groups=GROUPS,
        group_size=SIZE,
        max_prompt_length=4,
        max_new_tokens=LENGTH,
    )

    def gradient(groups: list[Group]) -> np.ndarray:
        state, _ = learn.learn(learner.start(base.params(0), base, config), groups)
        leaves = jax.tree.leaves(jax.device_get(state.policy.opt_state))
        return np.concatenate([np.ravel(leaf) for leaf in leaves])

    rng = np.random.default_rng(1)
    found: dict[str, Any] = {"clean": gradient(groups), "ours": [], "naive": []}
    for _ in range(draws):
        is_failed = rng.random((GROUPS, SIZE)) < FAILED
        for rule, outcome in (
            ("ours", ended("infra_fail", None)),
            ("naive", ended("ok", 0.0)),
        ):
            found[rule].append(gradient(failing(groups, is_failed, outcome)))
    return found


def figures(clean: np.ndarray, drawn: list[np.ndarray]) -> dict[str, float]:
    each = np.array(drawn)
    mean, size = each.mean(axis=0), np.linalg.norm(clean)
    deviation = np.sqrt(np.sum(each.var(axis=0, ddof=1)))
    return {
        "spread": float(deviation / size),
        "bias": float(np.linalg.norm(mean - clean) / (deviation / np.sqrt(len(each)))),
        "cosine": float(mean @ clean / (np.linalg.norm(mean) * size)),
        "length": float(np.linalg.norm(mean) / size),
    }


def plot(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Each incident's gradient: along the clean one, and how far from that line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axis, (name, vectors) in zip(figure.subplots(1, len(found)), found.items()):
        clean = vectors["clean"]
        for rule, colour in (("naive", "tab:red"), ("ours", "tab:blue")):
            each = np.array(vectors[rule])
            along = each @ clean / (clean @ clean)
            across = np.linalg.norm(each - along[:, None] * clean, axis=1)
            axis.scatter(along, across / np.linalg.norm(clean), s=9, c=colour, label=rule)
        axis.scatter([1], [0], marker="*", s=120, c="black", label="all episodes")
        axis.set(title=name, xlabel="along the clean gradient", ylabel="across it")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    options = parser.parse_args()
    groups = episodes(np.random.default_rng(0))
    found = {name: gradients(name, groups, options.draws) for name in ALGORITHMS}
    results = {
        f"{name}, {rule}": figures(vectors["clean"], vectors[rule])
        for name, vectors in found.items()
        for rule in ("ours", "naive")
    }
    header = ["", "bias", "spread", "cosine", "length"]
    rows = [
        [name, *(f"{of[column]:.2f}" for column in header[1:])]
        for name, of in results.items()
    ]
    text = table(header, rows)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(options.plot, found)
    if options.markdown:
        write_section(options.markdown, "incident.py", text)
    ours = [of["bias"] for name, of in results.items() if name.endswith("ours")]
    naive = [of["bias"] for name, of in results.items() if name.endswith("naive")]
    sys.exit(0 if max(ours) < 2.0 < 5.0 < min(naive) else 1)


if __name__ == "__main__":
    main()
