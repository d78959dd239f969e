"""The loops, read top to bottom: a supervised warm start, then reinforcement.

    draw prompts -> sample groups (programs start as episodes end) -> collect outcomes
    -> advantages -> pack -> update -> log, checkpoint

`train` is the one function that a configuration binds. What changes as it runs is in
`run.Run`, and so is how it goes on after a stop.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optax
from jax.sharding import Mesh

from jaxpt import learner as learner_lib
from jaxpt import mesh as mesh_lib
from jaxpt import rounds
from jaxpt.base import Base
from jaxpt.checkpoint import Checkpoints
from jaxpt.data import packing, worked_solutions
from jaxpt.data.mixture import Draws, Mixture
from jaxpt.domains.domain import TRAIN
from jaxpt.evaluate import EvaluationConfig, evaluate
from jaxpt.learner import Learner, LearnerState, LearningConfig, Rows
from jaxpt.mesh import MeshConfig
from jaxpt.metrics import RunLog
from jaxpt.models import params as params_lib
from jaxpt.progress import ProgressBar
from jaxpt.report import write_report
from jaxpt.rl import aggregation, losses
from jaxpt.rl.update import init_state, state_shapes
from jaxpt.rollout.episodes import (
    MakePool,
    Pool,
    RolloutConfig,
    open_sampler,
    timed,
)
from jaxpt.run import (
    DONE,
    REINFORCEMENT,
    SUPERVISED,
    CheckpointConfig,
    Run,
    Stage,
    StopSignal,
    start_or_resume,
)
from jaxpt.types import Batch, Trajectory


class BaseLoader(Protocol):
    """See `jaxpt.base` and `jaxpt.convert`."""

    def load(self, workdir: Path, mesh: Mesh, corpus: Iterator[str]) -> Base: ...


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
    """Steps of an algorithm on groups of episodes.

    first_task: the index of the first prompt, to begin after the warm start's tasks.
    max_rounds: how often a step may sample, until as many groups as one round has are
      chosen by the algorithm (DAPO's dynamic sampling refills); what is left over is not
      learnt from.
    teacher: whom the student's logprobs are compared to, of the same tokenizer.
    """

    steps: int
    rollout: RolloutConfig
    learning: LearningConfig
    first_task: int = 0
    max_rounds: int = 1
    teacher: BaseLoader | None = None

    def __post_init__(self):
        if self.max_rounds < 1:
            raise ValueError(f"max_rounds={self.max_rounds} must be 1 or more.")


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
    stages = make_stages(loaded, supervised, reinforcement)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        stop = enter(StopSignal())
        sampler = enter(open_sampler(loaded, mixture, make_pool))
        log = enter(RunLog(workdir))
        checkpoints = Checkpoints(workdir / "checkpoints", keep=checkpoint.keep)
        stack.callback(checkpoints.close)
        state, progress = start_or_resume(loaded, seed, stages, checkpoints, log)
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
            run.enter(REINFORCEMENT, stages[REINFORCEMENT])
        if run.progress["stage"] == REINFORCEMENT:
            reinforcement_stage(run, reinforcement, workdir, on_first_step)
            heldout(run, evaluation, reinforcement.rollout, "after")
            run.progress["params_sha256"] = params_lib.content_hash(run.state.params)
            run.finish()
        return write_report(workdir, run.progress)


def make_stages(
    base: Base, supervised: SupervisedConfig | None, reinforcement: ReinforcementConfig
) -> dict[str, Stage]:
    """What a checkpoint of each stage holds; a fresh run starts with the first."""
    warm_up = supervised.optimizer if supervised else optax.identity()
    learning = reinforcement.learning
    reinforced = Stage(
        start=lambda params: learner_lib.start(params, base, learning),
        shapes=lambda: learner_lib.shapes(base, learning),
    )
    return {
        SUPERVISED: Stage(
            start=lambda params: LearnerState(init_state(params, warm_up)),
            shapes=lambda: LearnerState(state_shapes(base.param_shapes, warm_up)),
        ),
        REINFORCEMENT: reinforced,
        DONE: reinforced,
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
    update = learner_lib.jit_update(
        learner_lib.language_model(run.base, rows),
        losses.supervised,
        config.optimizer,
        rows,
        state_shapes(run.base.param_shapes, config.optimizer),
    )
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
                batch = _supervised_batch(run.base, examples, num_rows, rows.length)
            with timed(run.clock, "supervised"):
                policy, metrics = update(run.state.policy, batch)
                run.state = LearnerState(policy)
                metrics = learner_lib.host_metrics(metrics)
            metrics.pop("logprob_gap")  # there is no sampler to differ from
            run.log.scalars(run.progress["number"], SUPERVISED, metrics)
            bar.advance(step + 1, loss=metrics["loss"])
            run.end_step(last=step + 1 == config.steps)


def _supervised_batch(base: Base, examples, num_rows: int, row_length: int) -> Batch:
    groups = worked_solutions.groups(examples, base.tokenizer)
    packed = packing.pack(groups, num_rows=num_rows, row_length=row_length)
    masks = [np.ones(length, bool) for _, _, length in packed.places]
    weights = aggregation.token_mean(masks, np.arange(len(masks)))
    batch = dataclasses.replace(packed.batch, loss_weights=packed.scatter(weights))
    return learner_lib.on_mesh(base, batch)


def reinforcement_stage(
    run: Run,
    config: ReinforcementConfig,
    workdir: Path,
    on_first_step: Callable[[], None],
) -> None:
    """Each step samples, grades, credits, packs and updates."""
    rollout, mixture = config.rollout, run.sampler.mixture
    rounds.check_courses(mixture, rollout)
    learner = Learner(
        run.base,
        config.learning,
        num_groups=rollout.num_prompts,
        group_size=rollout.group_size,
        max_prompt_length=rollout.max_prompt_length,
        max_new_tokens=rollout.max_new_tokens,
        courses=mixture.courses,
        teacher=_teacher(run, config, workdir),
        plain_sampling=rollout.sampling.is_plain,
    )
    draws = Draws(mixture, run.progress["draws"], run.seed, config.first_task)
    with ProgressBar("reinforcement", total=config.steps, done=run.progress["step"]) as bar:
        for step in range(run.progress["step"], config.steps):
            clock: dict[str, float] = {}
            groups = rounds.sample(
                run,
                draws,
                rollout,
                max_rounds=config.max_rounds,
                enough=learner.is_full,
                clock=clock,
                on_phase=bar.phase,
            )
            bar.phase("learn")
            with timed(clock, "learn"):
                run.state, metrics = learner.learn(run.state, groups)
            metrics |= rounds.figures(run.sampler, groups)
            if len(mixture.courses) > 1:
                metrics |= rounds.figures_by_domain(run.sampler, groups)
                metrics |= draws.figures(step)
            _count(run, groups, clock, metrics.get("logprob_gap", 0.0))
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
            shown = {"reward": metrics.get("reward"), "passed": metrics.get("pass_rate")}
            bar.advance(step + 1, **{k: v for k, v in shown.items() if v is not None})
            run.end_step(last=step + 1 == config.steps)


def _teacher(run: Run, config: ReinforcementConfig, workdir: Path):
    """The teacher's base and parameters."""
    if config.teacher is None:
        return None
    teacher = config.teacher.load(workdir / "teacher", run.base.mesh, iter(()))
    if teacher.tokenizer.backend.to_str() != run.base.tokenizer.backend.to_str():
        raise ValueError(
            f"The teacher's tokenizer, of {teacher.tokenizer.vocab_size} tokens, is not "
            f"the student's, of {run.base.tokenizer.vocab_size}: their logprobs can't be "
            "compared."
        )
    return teacher, teacher.params(run.seed)


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
