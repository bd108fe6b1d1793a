"""Methods of asynchronous workers, with the options of the command line."""

from typing import Literal

import lsgd_jax as lj


def lsgd(
    local_pull: float = 0.1,
    global_pull: float = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
    blocking: bool = True,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """Asynchronous LSGD: pulls whenever the workers together have taken enough steps.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1]; 0 switches the level off.
      global_pull: pull towards the leader of all workers, in [0, 1]; 0 switches it off.
      local_period: steps per worker, on average, between pulls towards the node's leader.
      global_period: steps per worker, on average, between pulls towards the leader of all.
      loss_window: number of recent losses whose mean elects the leader.
      blocking: all workers meet for a pull, as in the original; otherwise no worker waits,
        and each is pulled towards the parameters that the leader has at the request.
      wire: the format in which parameters travel.
    """
    options = local_pull, global_pull, local_period, global_period, loss_window
    if not blocking:
        return lj.asynchronous.LSGD(*options, wire=wire)
    return lj.asynchronous.Pulls(lj.lsgd(*options, wire=wire), True, loss_window)


def diloco(
    local_steps: int = 64,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.5,
    momentum_every: int | None = None,
    together: bool = False,
    weights: Literal["steps", "equal"] = "steps",
    delay: int = 0,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """Asynchronous DiLoCo: each worker sends its pseudo-gradient as soon as it has one.

    Args:
      local_steps: steps of the fastest worker between two pseudo-gradients; other workers
        take fewer steps, in proportion to their speed.
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1]; above 0.5 only with many
        local steps.
      momentum_every: number of pseudo-gradients whose mean updates the momentum. Defaults
        to the number of workers, or to 1 with `together`.
      together: collect pseudo-gradients in rounds, which skip late workers.
      weights: weight of a pseudo-gradient: its number of steps, or equal weights.
      delay: maximum number of steps that a worker takes before it waits for the answer.
      wire: the format in which parameters travel.
    """
    outer = outer_learning_rate, outer_momentum, momentum_every
    options = together, weights, delay
    return lj.asynchronous.DiLoCo(local_steps, *outer, *options, wire=wire)


def dpsgd(
    topology: lj.topology.Graph = lj.topology.ring,
    staleness: int = 1,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """D-PSGD whose messages travel while the workers compute: overlap SGP on a ring.

    Args:
      topology: the graph of the neighbors.
      staleness: number of steps after which a worker waits for a message.
      wire: the format in which parameters travel.
    """
    return lj.asynchronous.OSGP(topology, staleness, wire=wire)


def decoupled_diloco(
    local_steps: int = 64,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 2,
    quorum: int | None = None,
    deviations: float = 3.0,
    merge: Literal["mean", "radial"] = "radial",
    mixing: float = 0.0,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """Decoupled DiLoCo: fragments take turns, which close with a quorum of the workers.

    Args:
      local_steps: steps of the fastest worker between two turns of one fragment.
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1].
      fragments: number of fragments; divides local_steps.
      quorum: number of answers that close a turn, after a grace. Defaults to a majority.
      deviations: the grace is the median of the lags of answers that came after a quorum,
        plus this many median absolute deviations.
      merge: 'radial', the mean norm along the mean direction of every tensor that is no
        embedding, or 'mean'.
      mixing: share of its own parameters that a worker keeps when a fragment arrives.
      wire: the format in which parameters travel.
    """
    outer, closing = (outer_learning_rate, outer_momentum), (quorum, deviations, merge)
    return lj.asynchronous.DecoupledDiLoCo(
        local_steps, *outer, fragments, *closing, is_embedding, mixing=mixing, wire=wire
    )


def is_embedding(path: str) -> bool:
    """Whether a parameter is an embedding, which the radial merge leaves out."""
    return path.rpartition("/")[2] == "embedding"
