"""What the pulls of an optimizer did last, read from its state without communication."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._types import Tree
from lsgd_jax.collectives import Axes
from lsgd_jax.pull import PullState, QuarantineState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """What one pull of a chain did so far.

    Attributes:
      steps: int32 scalar, steps taken.
      healed: int32 [W], how often each worker took its target whole (or, in an
        aggregation of gradients, was left out).
      leader: int32 [W], who led each worker at the last pull, an index in the group of
        `axes`; -1 before the first; None if the pull elects nobody.
      score: float [W], each worker's mean loss over its window; None likewise.
      axes: the mesh axes of the pull's group.
      period: its period, in steps.
      payload: bytes each worker hands to the collectives of one exchange.
    """

    steps: Array
    healed: Array
    leader: Array | None
    score: Array | None
    axes: Axes = dataclasses.field(metadata={"static": True})
    period: int = dataclasses.field(metadata={"static": True})
    payload: int = dataclasses.field(metadata={"static": True})

    @property
    def exchanges(self) -> int:
        """How often the workers have communicated."""
        return int(self.steps) // self.period

    @property
    def bytes_sent(self) -> int:
        """Bytes each worker has handed to collectives so far."""
        return self.exchanges * self.payload


def diagnostics(opt_state: Tree) -> tuple[Diagnostics, ...]:
    """What each `pull` in an optimizer's state did so far, in the order of the chain.

    Reads the state as `Workers.map` returns it; works under `jax.jit` as well, which
    copies what is needed before the state's buffers are donated to the next step.

    Args:
      opt_state: the state of a chain with `lsgd` or other pulls, leaves [W, ...].

    Returns:
      One `Diagnostics` per pull; for `lsgd` the local level, then the global one.

    >>> import optax
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=2, locals=2)
    >>> tx = optax.chain(optax.sgd(0.1), lj.lsgd(local_period=2, global_period=4))
    >>> state = workers.map(tx.init)(workers.put(jnp.ones((4, 3))))
    >>> [(level.axes, level.payload) for level in lj.diagnostics(state)]
    [('local', 16), (('node', 'local'), 16)]
    """
    is_pull = lambda node: isinstance(node, PullState)
    pulls = filter(is_pull, jax.tree.leaves(opt_state, is_leaf=is_pull))
    return tuple(
        Diagnostics(
            steps=state.count.value,
            healed=state.healed,
            leader=getattr(state.target, "leader", None),
            score=getattr(state.target, "score", None),
            axes=state.axes,
            period=state.period,
            payload=state.payload,
        )
        for state in pulls
    )


def waiting(opt_state: Tree) -> Array:
    """bool [W]: which workers are in `quarantine` now, waiting to be healed."""
    is_quarantine = lambda node: isinstance(node, QuarantineState)
    leaves = jax.tree.leaves(opt_state, is_leaf=is_quarantine)
    sick = [node.sick for node in leaves if is_quarantine(node)]
    return jnp.stack(sick).any(axis=0) if sick else jnp.zeros([], bool)
