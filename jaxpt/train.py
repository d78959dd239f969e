"""The loops, read top to bottom: a supervised warm start, then reinforcement.

    draw prompts -> sample groups (programs start as episodes end) -> collect outcomes
    -> advantages -> pack -> update -> log, checkpoint

`train` is the one function that a configuration binds. What changes as it runs is in
`run.Run`, and so is how it goes on after a stop.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpt import mesh as mesh_lib
from jaxpt.base import Base
from jaxpt.checkpoint import Checkpoints
from jaxpt.data import batches, packing, worked_solutions
from jaxpt.data.mixture import Mixture
from jaxpt.domains.domain import TRAIN
from jaxpt.evaluate import EvaluationConfig, evaluate, passed
from jaxpt.mesh import MeshConfig
from jaxpt.metrics import RunLog
from jaxpt.models import moe
from jaxpt.models import params as params_lib
from jaxpt.policy import packed_logprobs
from jaxpt.progress import ProgressBar
from jaxpt.report import write_report
from jaxpt.rl import losses
from jaxpt.rl.update import LossFn, make_update
from jaxpt.rollout.episodes import (
    MakePool,
    Pool,
    RolloutConfig,
    Sampler,
    open_sampler,
    timed,
)
from jaxpt.run import (
    DONE,
    REINFORCEMENT,
    SUPERVISED,
    CheckpointConfig,
    Run,
    StopSignal,
    start_or_resume,
)
from jaxpt.types import Batch, Trajectory


class BaseLoader(Protocol):
    """See `jaxpt.base` and `jaxpt.convert`."""

    def load(self, workdir: Path, mesh: Mesh, corpus: Iterator[str]) -> Base: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The shape of what is learnt from: packed rows, some of them in one pass.

    length: tokens in a row; micro_batch: rows in one forward and backward pass;
    logits_chunk: tokens whose logits exist at the same time.
    """

    length: int
    micro_batch: int
    logits_chunk: int = 4096

    def round_up(self, rows: int) -> int:
        return -(-rows // self.micro_batch) * self.micro_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """The warm start: cross-entropy on worked solutions of training tasks of a mixture."""

    mixture: Mixture
    steps: int
    batch_size: int
    num_examples: int
    optimizer: optax.GradientTransformation
    rows: Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcementConfig:
    """Policy-gradient steps on groups of episodes.

    first_task: the index of the first prompt, to begin after the warm start's tasks.
    epochs: updates on the same episodes. skip_uniform_groups: see
    `batches.from_trajectories`.
    """

    steps: int
    rollout: RolloutConfig
    optimizer: optax.GradientTransformation
    advantage_fn: batches.AdvantageFn
    loss_fn: LossFn
    rows: Rows
    first_task: int = 0
    epochs: int = 1
    skip_uniform_groups: bool = True


def train(
    *,
    workdir: Path,
    base: BaseLoader,
    mixture: Mixture,
    reinforcement: ReinforcementConfig,
    evaluation: EvaluationConfig,
    checkpoint: CheckpointConfig,
    supervised: SupervisedConfig | None = None,
    mesh: MeshConfig = MeshConfig(),
    seed: int = 0,
    make_pool: MakePool = Pool,
    on_start: Callable[[], None] = lambda: None,
    on_first_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs, or goes on with, the run in `workdir`; returns its summary.

    supervised: the warm start; without one, reinforcement starts on the base as it is.
    make_pool: of the sandboxes; how many workers, of which backend, with what waived.
    on_start: called when everything was found to be in order, before the first step.
    on_first_step: called once everything that the configuration names has been used.
    """
    start = time.perf_counter()
    device_mesh = mesh_lib.make_mesh(mesh)
    loaded = base.load(workdir, device_mesh, _corpus(mixture, seed))
    optimizers = stage_optimizers(supervised, reinforcement)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        stop = enter(StopSignal())
        sampler = enter(open_sampler(loaded, mixture, make_pool))
        log = enter(RunLog(workdir))
        checkpoints = Checkpoints(workdir / "checkpoints", keep=checkpoint.keep)
        stack.callback(checkpoints.close)
        state, progress = start_or_resume(loaded, seed, optimizers, checkpoints, log)
        run = Run(
            seed=seed,
            sampler=sampler,
            log=log,
            checkpoints=checkpoints,
            checkpoint=checkpoint,
            stop=stop,
            state=state,
            progress=progress,
        )
        del state  # the updates give its memory to the next one
        on_start()
        run.clock["setup"] = run.clock.get("setup", 0.0) + time.perf_counter() - start

        if run.progress["stage"] == SUPERVISED:
            if supervised is not None:
                supervised_stage(run, supervised, workdir)
            heldout(run, evaluation, reinforcement.rollout, "before")
            run.enter(REINFORCEMENT, reinforcement.optimizer)
        if run.progress["stage"] == REINFORCEMENT:
            reinforcement_stage(run, reinforcement, on_first_step)
            heldout(run, evaluation, reinforcement.rollout, "after")
            run.progress["params_sha256"] = params_lib.content_hash(run.state.params)
            run.finish()
        return write_report(workdir, run.progress)


def stage_optimizers(
    supervised: SupervisedConfig | None, reinforcement: ReinforcementConfig
) -> dict[str, optax.GradientTransformation]:
    """Whose state a checkpoint of a stage holds; a fresh run starts with the first."""
    return {
        SUPERVISED: supervised.optimizer if supervised else optax.identity(),
        REINFORCEMENT: reinforcement.optimizer,
        DONE: reinforcement.optimizer,
    }


def _corpus(mixture: Mixture, seed: int) -> Iterator[str]:
    """Text of the kind that is learnt, to train a tokenizer on."""
    for index in range(2000):
        domain, task = mixture.task(split=TRAIN, seed=seed, index=index)
        yield "\n".join(message["content"] for message in task.messages)
        yield domain.solution(task)


def supervised_stage(run: Run, config: SupervisedConfig, workdir: Path) -> None:
    """Cross-entropy on worked solutions, in an order that the step's number decides."""
    rows = config.rows
    num_rows = rows.round_up(config.batch_size)
    with timed(run.clock, "data"):
        source = worked_solutions.build(
            workdir / "data",
            config.mixture,
            num_examples=config.num_examples,
            seed=run.seed,
        )
    update = _jit_update(run, losses.supervised, config.optimizer, rows)
    with ProgressBar("warm start", total=config.steps, done=run.progress["step"]) as bar:
        for step in range(run.progress["step"], config.steps):
            with timed(run.clock, "data"):
                chosen = worked_solutions.order(
                    len(source),
                    seed=run.seed,
                    start=step * config.batch_size,
                    count=config.batch_size,
                )
                examples = source.__getitems__([int(i) for i in chosen])
                batch = packing.pack(
                    batches.from_solutions(
                        [_as_text(example) for example in examples],
                        run.base.tokenizer,
                    ),
                    num_rows=num_rows,
                    row_length=rows.length,
                )
            with timed(run.clock, "supervised"):
                run.state, metrics = update(run.state, _on_mesh(run, batch))
                metrics = _host_metrics(metrics)
            metrics.pop("logprob_gap")  # there is no sampler to differ from
            run.log.scalars(run.progress["number"], SUPERVISED, metrics)
            bar.advance(step + 1, loss=metrics["loss"])
            run.end_step(last=step + 1 == config.steps)


def reinforcement_stage(
    run: Run,
    config: ReinforcementConfig,
    on_first_step: Callable[[], None],
) -> None:
    """GRPO and its relatives: each step samples, grades, credits, packs and updates."""
    rollout, rows, sampler = config.rollout, config.rows, run.sampler
    num_rows = rows.round_up(
        packing.rows_needed(
            num_groups=rollout.num_prompts,
            group_size=rollout.group_size,
            prompt_length=rollout.max_prompt_length,
            completion_length=rollout.max_new_tokens,
            row_length=rows.length,
        )
    )
    update = _jit_update(run, config.loss_fn, config.optimizer, rows)
    with ProgressBar("reinforcement", total=config.steps, done=run.progress["step"]) as bar:
        for step in range(run.progress["step"], config.steps):
            clock: dict[str, float] = {}
            bar.phase("sample")
            with timed(clock, "draw"):
                prompts = [
                    sampler.mixture.draw(
                        sampler.base.tokenizer,
                        split=TRAIN,
                        seed=run.seed,
                        index=config.first_task + step * rollout.num_prompts + p,
                        max_length=rollout.max_prompt_length,
                    )
                    for p in range(rollout.num_prompts)
                ]
            groups = sampler.rollout(
                run.state.params,
                prompts,
                run.key("sample", step),
                rollout,
                episode_id=f"{REINFORCEMENT}/{step}",
                clock=clock,
                on_sampled=functools.partial(bar.phase, "reward"),
            )
            bar.phase("learn")
            with timed(clock, "learn"):
                advantages = batches.credit(groups, config.advantage_fn)
                batch = packing.pack(
                    batches.from_trajectories(
                        groups,
                        advantages,
                        skip_uniform_groups=config.skip_uniform_groups,
                    ),
                    num_rows=num_rows,
                    row_length=rows.length,
                )
                batch = _on_mesh(run, batch)
                metrics: dict[str, Any] = {}
                for epoch in range(config.epochs):
                    run.state, measured = update(run.state, batch)
                    # The gap is the sampler's only while the weights are still its own.
                    metrics = _host_metrics(measured) | (
                        {"logprob_gap": metrics["logprob_gap"]} if epoch else {}
                    )
            metrics |= _episode_metrics(sampler, groups)
            _count(run, groups, clock, metrics["logprob_gap"])
            run.log.scalars(
                run.progress["number"],
                REINFORCEMENT,
                metrics | {f"seconds_{name}": value for name, value in clock.items()},
            )
            run.log.trajectories(
                run.progress["number"], REINFORCEMENT, groups, run.base.tokenizer.decode
            )
            if step == 0:
                on_first_step()
            bar.advance(step + 1, reward=metrics["reward"], passed=metrics["pass_rate"])
            run.end_step(last=step + 1 == config.steps)


def heldout(run: Run, config: EvaluationConfig, rollout: RolloutConfig, when: str) -> None:
    """Evaluates on held-out tasks, sampled and greedy, and notes the figures."""
    figures: dict[str, Any] = {}
    with ProgressBar(f"held-out, {when}", total=2 * config.num_tasks, unit="tasks") as bar:
        for number, greedy in enumerate((False, True)):
            name = "greedy" if greedy else "sampled"
            clock: dict[str, float] = {}
            start = time.perf_counter()
            rate, groups = evaluate(
                run.sampler,
                run.state.params,
                run.key("evaluate", number),
                config,
                greedy=greedy,
                max_prompt_length=rollout.max_prompt_length,
                max_new_tokens=rollout.max_new_tokens,
                name=f"heldout/{when}/{name}",
                clock=clock,
                on_batch=lambda done, first=number * config.num_tasks: bar.advance(
                    first + done
                ),
            )
            _count(run, groups, {"evaluate": time.perf_counter() - start}, 0.0)
            run.log.trajectories(
                run.progress["number"],
                f"heldout_{when}_{name}",
                groups,
                run.base.tokenizer.decode,
            )
            figures[name] = rate.rate
            figures[f"{name}_by_domain"] = rate.by_domain
            figures[f"{name}_tasks"] = rate.graded
            figures[f"{name}_ungraded"] = rate.ungraded
    run.progress["heldout"][when] = figures


def _jit_update(
    run: Run, loss_fn: LossFn, optimizer: optax.GradientTransformation, rows: Rows
):
    policy = functools.partial(
        packed_logprobs,
        config=run.base.model,
        mesh=run.base.mesh,
        logits_chunk=rows.logits_chunk,
    )
    update = make_update(policy, loss_fn, optimizer, micro_batch_rows=rows.micro_batch)
    # The state keeps its layout, so that the second call is the first one's program.
    shardings = jax.tree.map(lambda x: x.sharding, run.state)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _on_mesh(run: Run, batch: Batch) -> Batch:
    rows = mesh_lib.named_sharding(run.base.mesh, ("batch",))
    everywhere = mesh_lib.named_sharding(run.base.mesh)
    return jax.tree.map(
        lambda x: jax.device_put(x, rows if np.ndim(x) else everywhere), batch
    )


def _as_text(example: dict[str, Any]) -> dict[str, str]:
    return {
        name: value.decode() if isinstance(value, bytes) else str(value)
        for name, value in example.items()
    }


def _host_metrics(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Scalars on the host; an expert load becomes one imbalance per layer."""
    host = jax.device_get(metrics)
    load = host.pop("expert_load", None)
    values = {name: float(value) for name, value in host.items()}
    if load is not None:
        for layer, imbalance in enumerate(np.asarray(moe.load_imbalance(load))):
            values[f"expert_imbalance_{layer}"] = float(imbalance)
    return values


def _episode_metrics(sampler: Sampler, groups: list[list[Trajectory]]) -> dict[str, Any]:
    """Of one step's episodes; means are over those that carry a reward."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = [t.outcome.reward.total for t in trajectories if t.outcome.reward]
    results = [passed(sampler, t) for t in trajectories]
    results = [result for result in results if result is not None]
    kinds = collections.Counter(t.outcome.kind for t in trajectories)
    return {
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "pass_rate": float(np.mean(results)) if results else 0.0,
        "completion_tokens": float(np.mean([len(t.tokens) for t in trajectories])),
        **{f"outcome_{kind}": count for kind, count in sorted(kinds.items())},
    }


def _count(
    run: Run,
    groups: list[list[Trajectory]],
    clock: dict[str, float],
    logprob_gap: float,
) -> None:
    """Adds a batch of episodes to the figures that the summary reports."""
    progress = run.progress
    for group in groups:
        for trajectory in group:
            outcome = trajectory.outcome
            counts = progress["outcomes"]
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            progress["programs_executed"] += "execute" in outcome.seconds
    for name, seconds in clock.items():
        run.clock[name] = run.clock.get(name, 0.0) + seconds
    progress["max_logprob_gap"] = max(progress["max_logprob_gap"], logprob_gap)
