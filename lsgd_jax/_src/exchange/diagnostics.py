"""Counters of an optimizer's exchanges, read from its state without communication."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lsgd_jax._src.exchange import traffic
from lsgd_jax._src.exchange.aggregate import AggregateState
from lsgd_jax._src.exchange.agreement import names
from lsgd_jax._src.exchange.fragments import each_of
from lsgd_jax._src.exchange.schedule import Schedule
from lsgd_jax._src.exchange.step import ExchangeState
from lsgd_jax._src.exchange.traffic import Traffic
from lsgd_jax._src.shared import WORKER_AXES
from lsgd_jax._src.trees import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """Counters of one pull of an exchange, or of one aggregation of gradients.

    Its `repr` shows the workers of this process, and None for all others: in several
    processes print ``workers.fetch(lj.diagnostics(state))``.

    Attributes:
      steps: int32 scalar, steps taken.
      restored: int32 [W], how often each worker was reset to its target. For an
        aggregation, how often its gradient was left out.
      dropped: int32 [W], how often the target of finite workers was not finite, such as
        the mean of 3e38 and 3e38, so that each worker stayed where it was; None for an
        aggregation.
      misplaced: int32 [W], the number of steps at which the parameters were not where the
        exchange had left them, because something changed the updates behind it.
      leader: int32 [W], the leader of each worker at the last election, an index in the
        group of `axes`; -1 before the first election; None if no leader is elected.
      score: float [W], each worker's mean loss over its window; None likewise.
      traffic: the traffic counters from the state.
      axes: the mesh axes of the group.
      differed: int32 [W], how often each worker differed from the majority in what must be
        bit-identical in the group; None without `verify`.
      leaf: int32 [W], the leaf in which it differed the last time, an index into `leaves`;
        -1 before; None likewise.
      dropped_in_a_row: int32 [W], for each worker how many exchanges have been dropped
        since the last one with a target. At 2 or more the workers train on alone; None for
        an aggregation.
      leaves: the paths of what is compared, and 'target' for the last target of the pull.
      schedule: when the pull sends, if `diagnostics` was told the method; otherwise None.
    """

    steps: Array
    restored: Array
    dropped: Array | None
    misplaced: Array
    leader: Array | None
    score: Array | None
    traffic: Traffic
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    differed: Array | None = None
    leaf: Array | None = None
    dropped_in_a_row: Array | None = None
    leaves: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    schedule: Schedule | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        """One line of plain numbers, read without communication.

        Workers of other processes have None in place of their numbers, and buffers that
        were donated have their type. `Workers.fetch` brings the numbers of all workers.
        """
        sent = self.traffic
        shown = {
            "axes": self.axes,
            "period": _shown(sent.every.value),
            "steps": _shown(self.steps),
            "exchanges": _shown(sent.exchanges.value),
            "bytes_sent": _shown(sent.bytes_sent.value, traffic.total),
        }
        counters = "restored", "dropped", "dropped_in_a_row", "misplaced"
        for name in (*counters, "leader", "score", "differed"):
            each = getattr(self, name)
            if each is not None:
                shown[name] = _shown(each)
        texts = (f"{name}={value}" for name, value in shown.items())
        return f"Diagnostics({', '.join(texts)})"

    @property
    def exchanges(self) -> int:
        """The number of times that the workers have communicated."""
        return int(self.traffic.exchanges.value)

    @property
    def period(self) -> int:
        """The number of steps between exchanges."""
        return int(self.traffic.every.value)

    @property
    def sends_at(self) -> int:
        """The step of the period at which it communicates; 0 for the last one."""
        return int(self.traffic.sends_at.value)

    @property
    def payload(self) -> int:
        """The bytes that each worker sends in one exchange; 0 before the first step."""
        return traffic.total(self.traffic.bytes_each.value)

    @property
    def bytes_sent(self) -> int:
        """The bytes that each worker has sent so far."""
        return traffic.total(self.traffic.bytes_sent.value)

    def is_due(self, step: int) -> bool:
        """Whether the workers communicate at this step, t = 1, 2, ….

        Without a `schedule` this is about steps with the present period.
        """
        if self.schedule is not None:
            return bool(self.schedule.sends(step))
        return step % self.period == self.sends_at


def diagnostics(opt_state: Tree, method: Any = None) -> tuple[Diagnostics, ...]:
    """Returns counters of each pull or aggregation of an optimizer, in chain order.

    Reads the state that `Workers.map` returns. Under `jax.jit` the counters are copied, so
    that the state's buffers may then be donated to the next step.

    Args:
      opt_state: the state of a chain with `lsgd` or other methods, leaves [W, ...].
      method: the method that pulls in this chain, if its period changes or begins late:
        `Diagnostics.is_due` then knows all of its steps.

    Raises:
      ValueError: the state is not that of the method.

    Returns:
      One `Diagnostics` per pull; for `lsgd` the local level, then the global one.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=2, locals=2)
    >>> tx = optax.chain(optax.sgd(0.1), lj.lsgd(local_period=2, global_period=4))
    >>> state = workers.map(tx.init)(workers.put(jnp.ones((4, 3))))
    >>> [(level.axes, level.period) for level in lj.diagnostics(state)]
    [(('local',), 2), (('node', 'local'), 4)]
    """
    pulls = () if method is None else method.pulls
    schedules = [each.schedule for pull in pulls for each in pull.each]
    found = []
    for node in states_of(opt_state):
        if isinstance(node, AggregateState):
            found.append(_of(node, node, None))
            continue
        lead = jnp.ndim(node.count.value)
        states = [each for state in node.pulls for each in each_of(state, lead)]
        known = schedules if method is not None else [None] * len(states)
        if len(known) != len(states):
            raise ValueError(
                f"`method` must be that of the state, which has {len(states)} pulls and "
                f"fragments, got a method with {len(known)}"
            )
        for pull, schedule in zip(states, known):
            found.append(_of(node, pull, pull.rule, schedule))
    return tuple(found)


def _of(node, pull, rule, schedule=None) -> Diagnostics:
    agreement = getattr(pull, "agreement", None) or None

    def place(axis: str) -> int:
        return WORKER_AXES.index(axis) if axis in WORKER_AXES else -1

    # A user's own vmap has stacked values that are equal on all workers.
    first = (0,) * jnp.ndim(node.count.value)
    return Diagnostics(
        # Below 0 the exchange of the last step has not run, see `loop`.
        steps=abs(node.count.value[first]),
        restored=pull.restored,
        dropped=getattr(pull, "dropped", None),
        misplaced=node.misplaced,
        leader=getattr(rule, "leader", None),
        score=getattr(rule, "score", None),
        traffic=jax.tree.map(lambda x: x[first], pull.traffic),
        axes=tuple(sorted(pull.traffic.axes, key=place)),
        differed=agreement and agreement.differed,
        leaf=agreement and agreement.leaf,
        dropped_in_a_row=getattr(pull, "dropped_in_a_row", None),
        leaves=names(pull) if agreement else (),
        schedule=schedule,
    )


def _shown(x: Any, numbers_of: Callable[[Any], Any] = np.ndarray.tolist) -> Any:
    """The numbers of a leaf as far as they are here, otherwise its type."""
    if not hasattr(x, "dtype"):
        return x
    is_on_devices = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    is_on_host = isinstance(x, np.ndarray | np.generic)
    if not is_on_host and (not is_on_devices or x.is_deleted()):
        return f"{x.dtype}{list(x.shape)}"
    if is_on_devices and not (x.is_fully_addressable or x.is_fully_replicated):
        return _rows_here(x)
    return numbers_of(np.asarray(x))


def _rows_here(x: Array) -> list[Any]:
    """The rows of an array [W], with None in place of those of other processes."""
    rows = np.full(x.shape, None, object)
    for shard in x.addressable_shards:
        rows[shard.index] = np.asarray(shard.data)
    return rows.tolist()


def waiting(opt_state: Tree) -> Array:
    """Returns which workers are not finite and wait to be restored: bool [W]."""
    nodes = states_of(opt_state)
    finite = [node.is_finite for node in nodes if isinstance(node, ExchangeState)]
    return ~jnp.stack(finite).all(axis=0) if finite else jnp.zeros([], bool)


def check_not_misplaced(tree: Tree, read_all: Callable[[Tree], Tree]) -> None:
    """Raises ValueError if a state of an exchange in the tree counts misplaced parameters.

    Args:
      tree: the result of a mapped function, which may contain states of exchanges.
      read_all: copies their counters to the host, in every process.
    """
    found = [node.misplaced for node in states_of(tree)]
    if any(isinstance(x, jax.core.Tracer) for x in found):
        return  # the call itself is being traced, so there are no values yet
    counts = read_all(found)
    workers = sorted({int(i) for count in counts for i in np.flatnonzero(count > 0)})
    if workers:
        raise ValueError(
            "the parameters are not where the exchange left them at the last step: an "
            "exchange must stand last in its chain (behind clipping, scaling and the base "
            "optimizer), an aggregation of gradients first; seen on "
            f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
        )


def states_of(opt_state: Tree) -> list:
    """The states of exchanges and aggregations in a tree."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, ExchangeState | AggregateState)

    return list(filter(is_ours, jax.tree.leaves(opt_state, is_leaf=is_ours)))
