"""From groups of trajectories to updates: choose, pack, score, credit, weigh, learn.

    chosen -> packed rows -> scores of reference, teacher and critic -> credited batches
    -> updates of the policy, and of the critic

The arithmetic is in `rl`, the host's part in `credit`; here both get models and programs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxpt import credit
from jaxpt import mesh as mesh_lib
from jaxpt.base import Base
from jaxpt.credit import Chosen, Plan, Scores
from jaxpt.data import packing
from jaxpt.data.mixture import Course
from jaxpt.data.packing import Packed
from jaxpt.models import moe, value
from jaxpt.models import params as params_lib
from jaxpt.policy import packed_logprobs, packed_values
from jaxpt.rl import advantages, aggregation, losses
from jaxpt.rl.advantages import AdvantageFn, Ragged
from jaxpt.rl.aggregation import ShareFn
from jaxpt.rl.algorithm import Algorithm
from jaxpt.rl.check import check
from jaxpt.rl.losses import LossFn
from jaxpt.rl.update import (
    Model,
    TrainState,
    init_state,
    make_score,
    make_update,
    state_shapes,
)
from jaxpt.types import Batch, Trajectory

Metrics = dict[str, Any]


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
class CriticConfig:
    """A model of the policy's size that learns what is still to be earned.

    It starts as a copy of the policy with a head that says 0.

    advantage: its errors as `advantages.generalized` gives them; values plus these are what
      it should have said.
    """

    optimizer: optax.GradientTransformation
    loss_fn: LossFn = losses.value_loss
    advantage: AdvantageFn = advantages.generalized


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """An algorithm and what it learns with.

    share: what each domain of a mixture counts in a batch's loss.
    epochs: updates on the same episodes; minibatches: parts that a batch's groups are cut
      into, an update for each.
    reference: whether the policy of the stage's start is kept, for a penalty or DPO.
    recompute_old_logprobs: ratios are taken against what the learner itself makes of the
      episodes before the first update, and not against what the sampler said.
    """

    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    rows: Rows
    share: ShareFn = aggregation.by_tokens
    epochs: int = 1
    minibatches: int = 1
    critic: CriticConfig | None = None
    reference: bool = False
    recompute_old_logprobs: bool = False

    def __post_init__(self):
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")


@struct.dataclass
class LearnerState:
    """Everything that learning changes, and the reference policy's parameters."""

    policy: TrainState
    critic: TrainState | None = None
    reference: Any = None

    @property
    def params(self) -> Any:
        return self.policy.params


def start(params: Any, base: Base, config: LearningConfig) -> LearnerState:
    """The state before a stage's first step."""
    critic = None
    if config.critic is not None:
        critic = init_state(
            value.from_language_model(params, base.mesh), config.critic.optimizer
        )
    return LearnerState(
        policy=init_state(params, config.optimizer),
        critic=critic,
        # A copy: an update gives its old parameters' memory to the new ones.
        reference=jax.tree.map(jnp.copy, params) if config.reference else None,
    )


def shapes(base: Base, config: LearningConfig) -> LearnerState:
    """The state as ShapeDtypeStructs with shardings."""
    critic = None
    if config.critic is not None:
        specs = params_lib.shapes(value.param_specs(base.model), base.mesh)
        critic = state_shapes(specs, config.critic.optimizer)
    return LearnerState(
        policy=state_shapes(base.param_shapes, config.optimizer),
        critic=critic,
        reference=base.param_shapes if config.reference else None,
    )


class Learner:
    """The programs of one stage: `learn` turns groups into updates.

    num_groups, group_size: the most that one step learns from; max_prompt_length,
    max_new_tokens: in tokens.
    courses: how each domain of a mixture is learnt; those without have the defaults.
    teacher: another model's base and parameters, of the same tokenizer.
    plain_sampling: whether episodes are drawn from the policy as it is; see
    `SamplingConfig.is_plain`.

    Raises:
      ValueError: the algorithm needs something that is missing, or something has no effect.
    """

    def __init__(
        self,
        base: Base,
        config: LearningConfig,
        *,
        num_groups: int,
        group_size: int,
        max_prompt_length: int,
        max_new_tokens: int,
        courses: Mapping[str, Course] = MappingProxyType({}),
        teacher: tuple[Base, Any] | None = None,
        plain_sampling: bool = False,
    ):
        self._plan = plan = Plan(
            algorithm=config.algorithm, share=config.share, courses=courses
        )
        check(
            plan.algorithms,
            group_size=group_size,
            reference=config.reference,
            critic=config.critic is not None,
            teacher=teacher is not None,
            drawn_is_old=plain_sampling and not config.recompute_old_logprobs,
        )
        if config.minibatches > num_groups:
            raise ValueError(
                f"minibatches={config.minibatches} can't be cut from {num_groups} groups."
            )
        self.base, self._config, self._teacher = base, config, teacher
        self._num_groups, self._group_size = num_groups, group_size
        rows = config.rows
        self._num_rows = rows.round_up(
            packing.rows_needed(
                num_groups=-(-num_groups // config.minibatches),
                group_size=group_size,
                prompt_length=max_prompt_length,
                completion_length=max_new_tokens,
                row_length=rows.length,
                together=max(a.together for a in plan.algorithms),
            )
        )
        policy, state = language_model(base, rows), shapes(base, config)
        loss_fn = losses.by_loss_id(*(a.loss for a in plan.algorithms))
        self._update = jit_update(policy, loss_fn, config.optimizer, rows, state.policy)
        self._logprobs = _jit_score(policy, rows)
        if config.critic is not None:
            critic = functools.partial(packed_values, config=base.model, mesh=base.mesh)
            assert state.critic is not None
            self._critic_update = jit_update(
                critic, config.critic.loss_fn, config.critic.optimizer, rows, state.critic
            )
            self._values = _jit_score(critic, rows)
        if teacher is not None:
            self._teacher_logprobs = _jit_score(language_model(teacher[0], rows), rows)

    def learn(
        self, state: LearnerState, groups: Sequence[Sequence[Trajectory]]
    ) -> tuple[LearnerState, Metrics]:
        """The state after this step, and its metrics; the old state's memory is reused.

        Of several updates the metrics are the last one's, but for `logprob_gap`, the
        first one's. Without a group to learn from nothing changes, and `groups_learnt` is
        0.
        """
        config = self._config
        chosen = self._fitting(credit.choose(self._plan, groups))
        metrics: Metrics = {"groups_learnt": len(chosen)}
        if not chosen:
            return state, metrics
        cuts = np.linspace(0, len(chosen), config.minibatches + 1).round().astype(int)
        parts = [chosen[a:b] for a, b in itertools.pairwise(cuts) if b > a]
        packed = [
            credit.pack(
                self._plan, part, num_rows=self._num_rows, row_length=config.rows.length
            )
            for part in parts
        ]
        packed = [
            dataclasses.replace(rows, batch=on_mesh(self.base, rows.batch))
            for rows in packed
        ]
        scores = self._scores(state, packed)
        batches = [
            on_mesh(self.base, batch)
            for batch in credit.credited(
                self._plan,
                parts,
                packed,
                scores,
                critic_advantage=config.critic.advantage if config.critic else None,
            )
        ]
        policy, critic = state.policy, state.critic
        for number in range(config.epochs * len(batches)):
            batch = batches[number % len(batches)]
            policy, measured = self._update(policy, batch)
            if number == 0:  # while the weights are still those that sampled
                metrics["logprob_gap"] = float(measured["logprob_gap"])
            del measured["logprob_gap"]
            if critic is not None:
                critic, of_critic = self._critic_update(critic, batch)
                del of_critic["logprob_gap"]
                metrics |= {f"critic_{k}": v for k, v in host_metrics(of_critic).items()}
        metrics |= host_metrics(measured)
        return dataclasses.replace(state, policy=policy, critic=critic), metrics

    def is_full(self, groups: Sequence[Sequence[Trajectory]]) -> bool:
        """Whether one step can't learn from more than these."""
        chosen = credit.choose(self._plan, groups)
        return sum(map(self._places, chosen)) >= self._num_groups

    def _fitting(self, chosen: list[Chosen]) -> list[Chosen]:
        """The first of them that one step has room for."""
        places = np.cumsum([self._places(group) for group in chosen])
        return chosen[: int(np.searchsorted(places, self._num_groups, "right"))]

    def _places(self, group: Chosen) -> int:
        return -(-len(group.episodes) // self._group_size)

    def _scores(self, state: LearnerState, packed: Sequence[Packed]) -> Scores:
        """What other models, and the policy itself, say of the rows as they are."""
        config = self._config

        def said(score, params: Any, field: str) -> Ragged:
            arrays = [getattr(score(params, rows.batch), field) for rows in packed]
            return [
                own for rows, array in zip(packed, arrays) for own in rows.gather(array)
            ]

        scores = Scores()
        if config.reference:
            scores.reference = said(self._logprobs, state.reference, "logprobs")
        if config.recompute_old_logprobs:
            scores.old = said(self._logprobs, state.params, "logprobs")
        if state.critic is not None:
            scores.values = said(self._values, state.critic.params, "values")
        if self._teacher is not None:
            scores.teacher = said(self._teacher_logprobs, self._teacher[1], "logprobs")
        return scores


def language_model(base: Base, rows: Rows) -> Model:
    return functools.partial(
        packed_logprobs,
        config=base.model,
        mesh=base.mesh,
        logits_chunk=rows.logits_chunk,
    )


def jit_update(
    model: Model,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    rows: Rows,
    state: TrainState,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The compiled update; `state` is donated, and keeps its layout, which these shapes
    tell, so that the second call is the first one's program."""
    update = make_update(model, loss_fn, optimizer, micro_batch_rows=rows.micro_batch)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _jit_score(model: Model, rows: Rows) -> Callable[[Any, Batch], Any]:
    return jax.jit(make_score(model, micro_batch_rows=rows.micro_batch))


def on_mesh(base: Base, arrays: Any) -> Any:
    """Arrays of rows in their shards, and scalars everywhere."""
    rows = mesh_lib.named_sharding(base.mesh, ("batch",))
    everywhere = mesh_lib.named_sharding(base.mesh)
    return jax.tree.map(
        lambda x: jax.device_put(x, rows if np.ndim(x) else everywhere), arrays
    )


def host_metrics(metrics: dict[str, jax.Array]) -> Metrics:
    """Scalars on the host; an expert load becomes one imbalance per layer."""
    host = jax.device_get(metrics)
    load = host.pop("expert_load", None)
    values = {name: float(value) for name, value in host.items()}
    if load is not None:
        for layer, imbalance in enumerate(np.asarray(moe.load_imbalance(load))):
            values[f"expert_imbalance_{layer}"] = float(imbalance)
    return values
