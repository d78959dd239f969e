"""Worked solutions of a mixture's tasks as a TFDS dataset, read by random access.

Built once into a folder (array_record files, no TensorFlow), so the position in the data
is one number: the examples' order is a permutation made from (seed, epoch).
"""

import contextlib
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpt.data.mixture import Mixture
from jaxpt.data.packing import Completion, Group
from jaxpt.data.tokenizer import Tokenizer


def build(folder: Path, mixture: Mixture, *, num_examples: int, seed: int) -> Any:
    """Opens the dataset in `folder`, and builds it first if it isn't there.

    Returns a random-access source: `source[i]` is {"task_id", "messages", "solution"},
    the messages as JSON text. Examples come from the training split.

    Raises:
      OSError: the folder can't be written; nothing is left of the attempt.
    """
    import os

    # The dataset never leaves this machine, so nothing asks a bucket about it.
    os.environ.setdefault("TFDS_DISABLE_GCS", "1")
    import tensorflow_datasets as tfds

    class WorkedSolutions(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                description="Tasks of the training split with their worked solutions.",
                features=tfds.features.FeaturesDict(
                    {
                        "task_id": tfds.features.Text(),
                        "messages": tfds.features.Text(),
                        "solution": tfds.features.Text(),
                    }
                ),
            )

        def _split_generators(self, dl_manager):
            del dl_manager
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from examples(mixture, num_examples=num_examples, seed=seed)

    builder = WorkedSolutions(data_dir=folder, file_format="array_record")
    if not builder.data_path.exists():
        tfds.disable_progress_bar()
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it says that it downloads
                builder.download_and_prepare()
        except (OSError, RuntimeError) as error:  # the array_record writer's is the latter
            raise OSError(f"Worked solutions could not be written: {error}") from error
        finally:
            for half_written in builder.data_path.parent.glob("incomplete.*"):
                shutil.rmtree(half_written, ignore_errors=True)
    source: Any = builder.as_data_source(split="train")  # pyright: ignore[reportCallIssue]
    if len(source) != num_examples:
        raise ValueError(
            f"{folder} holds {len(source)} worked solutions, but {num_examples} are asked "
            "for; remove the folder to build it anew."
        )
    return source


def examples(mixture: Mixture, *, num_examples: int, seed: int):
    """Yields (key, example) for `build`; tasks are drawn as prompts are."""
    import json

    for index in range(num_examples):
        domain, task = mixture.task(split="train", seed=seed, index=index)
        yield (
            index,
            {
                "task_id": task.task_id,
                "messages": json.dumps(list(task.messages)),
                "solution": domain.solution(task),
            },
        )


def order(num_examples: int, *, seed: int, start: int, count: int) -> np.ndarray:
    """The examples number start, start + 1, ... of an endless stream of shuffled epochs."""
    indices = []
    while len(indices) < count:
        epoch, offset = divmod(start + len(indices), num_examples)
        permutation = np.random.default_rng([seed, epoch]).permutation(num_examples)
        indices.extend(permutation[offset : offset + count - len(indices)])
    return np.asarray(indices)


def groups(chosen: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[Group]:
    """Each example's prompt, with its solution and the end token as the one completion."""
    found = []
    for example in chosen:
        text = {
            name: value.decode() if isinstance(value, bytes) else str(value)
            for name, value in example.items()
        }
        tokens = np.asarray(
            [*tokenizer.encode(text["solution"]), tokenizer.eos_id], np.int32
        )
        zeros = np.zeros(len(tokens), np.float32)
        completion = Completion(
            tokens=tokens,
            mask=np.ones(len(tokens), np.float32),
            logprobs=zeros,
            processed_logprobs=zeros,
        )
        prompt = tokenizer.encode_chat(json.loads(text["messages"]))
        found.append(Group(prompt=prompt, completions=[completion]))
    return found
