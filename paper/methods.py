"""The two methods of the paper's exact experiments, in its own form, from the library."""

import optax

import lsgd_jax as lj


Rate = optax.ScalarOrSchedule


def lgd(learning_rate: Rate, pull: Rate) -> optax.GradientTransformationExtraArgs:
    r"""Leader gradient descent, the paper's equation (2), at every step.

    .. math::
      x_i \leftarrow x_i - \eta \nabla f(x_i) - \lambda (x_i - x_l),
      \qquad l = \arg\min_j f(x_j)

    for all workers i of a node at once, with η the learning rate and λ the pull, both
    numbers or schedules (η of the steps before, λ of the step's number from 1).
    """
    leader = lj.lsgd(
        local_pull=pull,
        global_pull=0.0,
        local_period=1,
        loss_window=1,
        order="combine_then_adapt",
    )
    return optax.chain(optax.sgd(learning_rate), leader)


def easgd(learning_rate: Rate, beta: Rate) -> optax.GradientTransformationExtraArgs:
    r"""Elastic averaging gradient descent, at every step.

    .. math::
      x_i \leftarrow x_i - \eta \nabla f(x_i) - \frac{\beta}{W} (x_i - c), \qquad
      c \leftarrow (1 - \beta) c + \beta \frac{1}{W} \sum_j x_j

    with the old values on both right sides, W the workers of a node, c their center,
    which starts as the mean of their starts.
    """
    elastic = lj.easgd(beta, period=1, order="combine_then_adapt", axes="local")
    return optax.chain(optax.sgd(learning_rate), elastic)
