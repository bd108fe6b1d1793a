"""Methods of asynchronous workers, as the command line makes them."""

from typing import Literal

import optax

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
    """Asynchronous LSGD: pulls whenever all workers together have taken enough steps.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1]; 0 switches the level off.
      global_pull: pull towards the leader of all workers, in [0, 1]; 0 switches it off.
      local_period: steps per worker, on average, between pulls towards the node's leader.
      global_period: steps per worker, on average, between pulls towards the leader of all.
      loss_window: number of losses that elect the leader, the mean of the last ones.
      blocking: all come together for a pull, as in the original; otherwise no worker waits,
        and each is pulled towards what the leader was when it was asked.
      wire: the format in which parameters travel.
    """
    options = local_pull, global_pull, local_period, global_period, loss_window
    if not blocking:
        return lj.asynchronous.LSGD(*options, wire=wire)
    return _pulls(lj.lsgd(*options, wire=wire), budget=True, window=loss_window)


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
    """Asynchronous DiLoCo: each worker brings its pseudo-gradient when it has it.

    Args:
      local_steps: steps of the fastest worker between two of its pseudo-gradients; others
        take as many as their speed allows.
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1]; more than 0.5 only with
        many local steps.
      momentum_every: pseudo-gradients after which the momentum is renewed, with their mean;
        by default as many as there are workers, or 1 with `together`.
      together: pseudo-gradients come in rounds, which go on without those who are late.
      weights: whether a pseudo-gradient counts by the steps that it is made of.
      delay: steps that a worker takes at most before it waits for the answer.
      wire: the format in which parameters travel.
    """
    outer = outer_learning_rate, outer_momentum, momentum_every
    return lj.asynchronous.DiLoCo(local_steps, *outer, together, weights, delay, wire=wire)


def overlapped_lsgd(
    local_pull: float = 0.1,
    global_pull: float = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
    delay: int = 8,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """LSGD whose leaders' parameters travel while the workers go on.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1]; 0 switches the level off.
      global_pull: pull towards the leader of all workers, in [0, 1]; 0 switches it off.
      local_period: steps between pulls towards the node's leader.
      global_period: steps between pulls towards the leader of all.
      loss_window: number of losses that elect the leader, the mean of the last ones.
      delay: steps for which the parameters may travel before a worker waits for them; less
        than both periods.
      wire: the format in which parameters travel.
    """
    periods = local_period, global_period
    strengths = local_pull, global_pull
    pulls = lj.lsgd(*strengths, *periods, loss_window, delay=delay, wire=wire)
    return _pulls(pulls, window=loss_window)


def overlapped_diloco(
    period: int = 64,
    fragments: int = 1,
    delay: int = 8,
    mixing: float = 0.0,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """DiLoCo whose pseudo-gradients travel while the workers go on.

    Args:
      period: steps between exchanges of the same parameters.
      fragments: parts of the parameters that are exchanged one after the other.
      delay: steps for which they may travel before a worker waits for them; less than the
        period.
      mixing: share of its own parameters that a worker keeps, in [0, 1].
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1).
      wire: the format in which parameters travel.
    """
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    return _pulls(lj.diloco(period, outer, fragments, delay, mixing, wire=wire))


def _pulls(
    transformation: optax.GradientTransformation, budget: bool = False, window: int = 10
) -> lj.asynchronous.Pulls:
    assert isinstance(transformation, lj.Exchange)
    return lj.asynchronous.Pulls(transformation, budget, window)
