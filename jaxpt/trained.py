"""A run's model, from its workdir: to sample from, to look into, to go on with."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpt import configure, train
from jaxpt import mesh as mesh_lib
from jaxpt.base import Base
from jaxpt.checkpoint import Checkpoints
from jaxpt.inference.engine import generate, pad_prompts
from jaxpt.rl.update import TrainState, state_shapes


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run's configuration names, and its newest checkpoint.

    configuration: `train.train`'s arguments, built: `mixture`, `reinforcement`, ...
    progress: what the run knew of itself at the checkpoint; see `run.Run`.
    """

    configuration: Mapping[str, Any]
    base: Base
    state: TrainState
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


def load(workdir: Path) -> Trained:
    """Reads a run's configuration and newest checkpoint, on a mesh as the run's.

    Raises:
      ValueError: the folder holds no run, or no checkpoint yet.
    """
    saved = Path(workdir) / configure.CONFIG_FILE
    if not saved.exists():
        raise ValueError(f"{workdir} holds no run: {saved.name} is missing.")
    configure.parse(train.train, [saved])
    configuration = configure.arguments(train.train)
    mesh = mesh_lib.make_mesh(configuration.get("mesh", mesh_lib.MeshConfig()))
    base = configuration["base"].load(Path(workdir), mesh, corpus=())
    optimizers = train.stage_optimizers(
        configuration.get("supervised"), configuration["reinforcement"]
    )
    checkpoints = Checkpoints(
        Path(workdir) / "checkpoints", keep=configuration["checkpoint"].keep
    )
    try:
        restored = checkpoints.restore(
            lambda progress: state_shapes(base.param_shapes, optimizers[progress["stage"]])
        )
    finally:
        checkpoints.close()
    if restored is None:
        raise ValueError(f"{workdir} holds no whole checkpoint yet; let the run go on.")
    state, progress = restored
    return Trained(configuration, base, state, progress)
