"""Methods of asynchronous workers, as the command line makes them."""

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
    correction: Literal["none", "heloco"] = "none",
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
      correction: 'heloco' turns each tensor of a pseudo-gradient towards the outer momentum
        as far as it points away from it; 'none' is delayed Nesterov.
    """
    outer = outer_learning_rate, outer_momentum, momentum_every
    options = together, weights, delay
    return lj.asynchronous.DiLoCo(
        local_steps, *outer, *options, wire=wire, correction=correction
    )
