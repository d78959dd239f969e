"""The loops, read top to bottom: a supervised warm start, then reinforcement.

    draw prompts -> sample groups (programs start as episodes end) -> collect outcomes
    -> advantages -> pack -> update -> log, checkpoint

`train` is the one function that a configuration binds. Everything that changes as it runs
is in `Run`: the learner's state (a pytree) and the progress (JSON), which make a checkpoint
together. A run killed at any moment goes on from the last one as if nothing had happened,
since every draw and every key is made from a step's number.
"""

import collections
import contextlib
import dataclasses
import functools
import signal
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
from jaxpt.data.mixture import TRAIN, Mixture
from jaxpt.evaluate import EvaluationConfig, evaluate, passed
from jaxpt.mesh import MeshConfig
from jaxpt.metrics import RunLog
from jaxpt.models import moe
from jaxpt.models import params as params_lib
from jaxpt.policy import packed_logprobs
from jaxpt.progress import ProgressBar
from jaxpt.report import write_report
from jaxpt.rewards.callback_queue import CallbackQueue
from jaxpt.rl import losses
from jaxpt.rl.update import LossFn, TrainState, init_state, make_update
from jaxpt.rollout.episodes import RolloutConfig, Sampler, timed
from jaxpt.types import Batch, Trajectory
from sandbox.pool import Pool

SUPERVISED, REINFORCEMENT, DONE = "supervised", "reinforcement", "done"


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
    """The warm start: cross-entropy on worked solutions of training tasks."""

    steps: int
    batch_size: int
    num_examples: int
    optimizer: optax.GradientTransformation
    rows: Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcementConfig:
    """Policy-gradient steps on groups of episodes.

    epochs: updates on the same episodes. skip_uniform_groups: see
    `batches.from_trajectories`.
    """

    steps: int
    rollout: RolloutConfig
    optimizer: optax.GradientTransformation
    advantage_fn: batches.AdvantageFn
    loss_fn: LossFn
    rows: Rows
    epochs: int = 1
    skip_uniform_groups: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `every` steps of a stage, of which the newest `keep` stay."""

    every: int
    keep: int = 2


@dataclasses.dataclass
class Run:
    """A run as it goes on: what is fixed, and the state and progress that change."""

    seed: int
    mesh: Mesh
    base: Base
    sampler: Sampler
    log: RunLog
    checkpoints: Checkpoints
    checkpoint: CheckpointConfig
    state: TrainState
    progress: dict[str, Any]
    stop: "StopSignal"

    def key(self, purpose: str, step: int) -> jax.Array:
        """A key for one use: its purpose and the step's number name it."""
        purposes = ("sample", "evaluate")
        key = jax.random.fold_in(jax.random.key(self.seed), purposes.index(purpose))
        return jax.random.fold_in(key, step)

    @property
    def clock(self) -> dict[str, float]:
        return self.progress["seconds"]

    def save(self, number: int) -> None:
        with timed(self.clock, "checkpoint"):
            self.progress["log"] = self.log.positions()
            self.checkpoints.save(number, self.state, self.progress)

    def end_step(self, number: int, *, last: bool) -> None:
        """After a step of a stage: saves when it is time, leaves when asked to."""
        due = self.progress["step"] % self.checkpoint.every == 0
        if self.stop.requested or (due and not last):
            self.save(number)
        self.stop.leave_if_requested()


class StopSignal:
    """SIGTERM asks for a checkpoint and an orderly end, after the step at hand."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "StopSignal":
        self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *exc_info) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _request(self, *_) -> None:
        self.requested = True

    def leave_if_requested(self) -> None:
        if self.requested:
            raise SystemExit(128 + signal.SIGTERM)


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
    sandbox_workers: int = 2,
    on_start: Callable[[], None] = lambda: None,
    on_first_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs, or goes on with, the run in `workdir`; returns its summary.

    supervised: the warm start; without one, reinforcement starts on the base as it is.
    on_start: called when everything was found to be in order, before the first step.
    on_first_step: called once everything that the configuration names has been used.
    """
    start = time.perf_counter()
    device_mesh = mesh_lib.make_mesh(mesh)
    loaded = base.load(workdir, device_mesh, _corpus(mixture, seed))
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        stop = enter(StopSignal())
        sampler = Sampler(
            model=loaded.model,
            mesh=device_mesh,
            tokenizer=loaded.tokenizer,
            mixture=mixture,
            pool=enter(Pool(num_workers=sandbox_workers)),
            queue=enter(CallbackQueue(device_mesh)),
        )
        log = enter(RunLog(workdir))
        checkpoints = Checkpoints(workdir / "checkpoints", keep=checkpoint.keep)
        stack.callback(checkpoints.close)
        run = _start_or_resume(
            Run(
                seed=seed,
                mesh=device_mesh,
                base=loaded,
                sampler=sampler,
                log=log,
                checkpoints=checkpoints,
                checkpoint=checkpoint,
                state=None,  # type: ignore[arg-type]
                progress=_fresh_progress(),
                stop=stop,
            ),
            supervised,
            reinforcement,
        )
        on_start()
        run.clock["setup"] = run.clock.get("setup", 0.0) + time.perf_counter() - start

        if run.progress["stage"] == SUPERVISED:
            if supervised is not None:
                supervised_stage(run, mixture, supervised, workdir)
            heldout(run, evaluation, reinforcement.rollout, "before")
            run.state = init_state(run.state.params, reinforcement.optimizer)
            run.progress |= {"stage": REINFORCEMENT, "step": 0}
            run.save(_supervised_steps(supervised))
        if run.progress["stage"] == REINFORCEMENT:
            reinforcement_stage(
                run, reinforcement, _supervised_steps(supervised), on_first_step
            )
            heldout(run, evaluation, reinforcement.rollout, "after")
            run.progress["stage"] = DONE
            run.progress["params_sha256"] = params_lib.content_hash(run.state.params)
            run.save(_supervised_steps(supervised) + reinforcement.steps + 1)
        return write_report(workdir, run.progress)


def _fresh_progress() -> dict[str, Any]:
    return {
        "stage": SUPERVISED,
        "step": 0,
        "log": {},
        "seconds": {},
        "outcomes": {},
        "programs_executed": 0,
        "max_logprob_gap": 0.0,
        "heldout": {},
    }


def _supervised_steps(supervised: SupervisedConfig | None) -> int:
    return supervised.steps if supervised else 0


def _corpus(mixture: Mixture, seed: int) -> Iterator[str]:
    """Text of the kind that is learnt, to train a tokenizer on."""
    for index in range(2000):
        domain, task = mixture.task(split=TRAIN, seed=seed, index=index)
        yield "\n".join(message["content"] for message in task.messages)
        yield domain.solution(task)


def _start_or_resume(
    run: Run,
    supervised: SupervisedConfig | None,
    reinforcement: ReinforcementConfig,
) -> Run:
    """Gives the run its state and progress: the newest checkpoint's, or fresh ones."""
    first = supervised.optimizer if supervised else optax.identity()
    params = run.base.params(run.seed)

    def abstract_state(progress):
        optimizer = first if progress["stage"] == SUPERVISED else reinforcement.optimizer
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            init_state(params, optimizer),
        )

    restored = run.checkpoints.restore(abstract_state)
    if restored is None:
        run.log.rewind(dict.fromkeys(run.log.positions(), 0), step=-1)
        run.state = init_state(params, first)
        return run
    run.state, run.progress = restored
    run.log.rewind(run.progress["log"], step=int(run.progress["step"]))
    print(f"Resuming at step {run.progress['step']} of the {run.progress['stage']} stage.")
    return run


def supervised_stage(
    run: Run, mixture: Mixture, config: SupervisedConfig, workdir: Path
) -> None:
    """Cross-entropy on worked solutions, in an order that the step's number decides."""
    rows = config.rows
    num_rows = rows.round_up(config.batch_size)
    with timed(run.clock, "data"):
        source = worked_solutions.build(
            workdir / "data", mixture, num_examples=config.num_examples, seed=run.seed
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
            run.log.scalars(step, SUPERVISED, metrics)
            run.progress["step"] = step + 1
            bar.advance(step + 1, loss=metrics["loss"])
            run.end_step(step + 1, last=step + 1 == config.steps)


def reinforcement_stage(
    run: Run,
    config: ReinforcementConfig,
    first_number: int,
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
                        sampler.tokenizer,
                        split=TRAIN,
                        seed=run.seed,
                        index=step * rollout.num_prompts + p,
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
            number = first_number + step
            run.log.scalars(
                number,
                REINFORCEMENT,
                metrics | {f"seconds_{name}": value for name, value in clock.items()},
            )
            run.log.trajectories(number, REINFORCEMENT, groups, run.base.tokenizer.decode)
            run.progress["step"] = step + 1
            if step == 0:
                on_first_step()
            bar.advance(step + 1, reward=metrics["reward"], passed=metrics["pass_rate"])
            run.end_step(number + 1, last=step + 1 == config.steps)


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
                int(run.state.step),
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
        mesh=run.mesh,
        logits_chunk=rows.logits_chunk,
    )
    update = make_update(policy, loss_fn, optimizer, micro_batch_rows=rows.micro_batch)
    # The state keeps its layout, so that the second call is the first one's program.
    shardings = jax.tree.map(lambda x: x.sharding, run.state)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _on_mesh(run: Run, batch: Batch) -> Batch:
    rows = mesh_lib.named_sharding(run.mesh, ("batch",))
    everywhere = mesh_lib.named_sharding(run.mesh)
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
