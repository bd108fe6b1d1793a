"""Methods of workers that step at their own pace, as the command line makes them."""

import optax

import lsgd_jax as lj


def lsgd(
    local_pull: float = 0.1,
    global_pull: float = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
) -> lj.asynchronous.Method:
    """Asynchronous LSGD: pulls whenever all workers together have taken enough steps.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1]; 0 switches the level off.
      global_pull: pull towards the leader of all workers, in [0, 1]; 0 switches it off.
      local_period: steps per worker, on average, between pulls towards the node's leader.
      global_period: steps per worker, on average, between pulls towards the leader of all.
      loss_window: number of losses that elect the leader, the mean of the last ones.
    """
    pulls = lj.lsgd(local_pull, global_pull, local_period, global_period, loss_window)
    return _pulls(pulls, budget=True, window=loss_window)


def overlapped_lsgd(
    local_pull: float = 0.1,
    global_pull: float = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
    delay: int = 8,
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
    """
    periods = local_period, global_period
    pulls = lj.lsgd(local_pull, global_pull, *periods, loss_window, delay=delay)
    return _pulls(pulls, window=loss_window)


def overlapped_diloco(
    period: int = 64,
    fragments: int = 1,
    delay: int = 8,
    mixing: float = 0.0,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
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
    """
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    return _pulls(lj.diloco(period, outer, fragments, delay, mixing))


def _pulls(
    transformation: optax.GradientTransformation, budget: bool = False, window: int = 10
) -> lj.asynchronous.Pulls:
    assert isinstance(transformation, lj.Exchange)
    return lj.asynchronous.Pulls(transformation, budget, window)
