"""A run's model, from its workdir: to sample from, to look into, to go on with."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpt import configure, train
from jaxpt import mesh as mesh_lib
from jaxpt.base import Base
from jaxpt.checkpoint import Checkpoints
from jaxpt.inference.engine import generate, pad_prompts
from jaxpt.learner import LearnerState


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run's configuration names, and its newest checkpoint.

    configuration: `train.train`'s arguments, built: `mixture`, `reinforcement`, ...
    progress: what the run knew of itself at the checkpoint; see `run.Run`.
    """

    configuration: Mapping[str, Any]
    base: Base
    state: LearnerState
    progress: Mapping[str, Any]

    def complete(
        self,
        prompts: Sequence[str],
        *,
        temperature: float = 0.0,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> list[str]:
        """One completion of each prompt, greedy at temperature 0, as text.

        max_new_tokens: by default the run's.
        """
        tokenizer = self.base.tokenizer
        if max_new_tokens is None:
            max_new_tokens = self.configuration["reinforcement"].rollout.max_new_tokens
        encoded = [
            tokenizer.encode_chat([{"role": "user", "content": prompt}])
            for prompt in prompts
        ]
        padded, lengths = pad_prompts(
            encoded,
            num_prompts=len(encoded),
            length=max(map(len, encoded)),
            pad_id=tokenizer.pad_id,
        )
        samples = generate(
            self.state.params,
            padded,
            lengths,
            np.full(len(encoded), temperature, np.float32),
            jax.random.key(seed),
            config=self.base.model,
            mesh=self.base.mesh,
            group_size=1,
            max_new_tokens=max_new_tokens,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        )
        return [
            tokenizer.decode(tokens[0, : length[0]].tolist())
            for tokens, length in zip(
                np.asarray(samples.tokens), np.asarray(samples.lengths), strict=True
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromRun:
    """A finished run's model, to start from or to be taught by; on this run's mesh.

    workdir: of that run, which must not be this one's.
    """

    workdir: str

    def load(self, workdir: Path, mesh: Mesh, corpus: Iterable[str]) -> Base:
        """Its tokenizer, shape and newest parameters; the corpus is not needed."""
        del workdir, corpus
        with configure.apart():
            run = load(Path(self.workdir), mesh)
        return dataclasses.replace(run.base, params=lambda seed: run.state.params)


def load(workdir: Path, mesh: Mesh | None = None) -> Trained:
    """Reads a run's configuration and newest checkpoint.

    mesh: to put it on; by default one as the run's.

    Raises:
      ValueError: the folder holds no run, or no checkpoint yet.
    """
    saved = Path(workdir) / configure.CONFIG_FILE
    if not saved.exists():
        raise ValueError(f"{workdir} holds no run: {saved.name} is missing.")
    configure.parse(train.train, [saved])
    configuration = configure.arguments(train.train)
    if mesh is None:
        mesh = mesh_lib.make_mesh(configuration.get("mesh", mesh_lib.MeshConfig()))
    base = configuration["base"].load(Path(workdir), mesh, corpus=())
    stages = train.make_stages(
        base, configuration.get("supervised"), configuration["reinforcement"]
    )
    checkpoints = Checkpoints(
        Path(workdir) / "checkpoints", keep=configuration["checkpoint"].keep
    )
    try:
        restored = checkpoints.restore(lambda progress: stages[progress["stage"]].shapes())
    finally:
        checkpoints.close()
    if restored is None:
        raise ValueError(f"{workdir} holds no whole checkpoint yet; let the run go on.")
    state, progress = restored
    return Trained(configuration, base, state, progress)
