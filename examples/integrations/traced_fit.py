"""GPJax and jaxopt: rounds of `gpx.fit` and of `solver.run`, which can be traced.

Four workers with different data. After each round local SGD takes the mean, which is
compared with the mean by hand. Tested with gpjax 1.0.0, jaxopt 0.8.5 and jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import jaxopt
import optax
from own_loop import batches_of, compare

import lsgd_jax as lj


lj.emulate_devices(4)  # now, because GPJax uses a device when it is imported
import gpjax  # noqa: E402


def with_workers(fit, params, batches):
    workers = lj.Workers(nodes=4, locals=1)  # new
    train = lj.around(fit, lj.local_sgd(period=1), params=(), loss=None)  # new
    state = workers.map(train.init)(workers.replicate(params))  # new
    train = workers.map(train)  # new, in place of jax.jit
    for batch in batches:
        state, *_ = train(state, workers.put(batch))  # new: put
    return state.state


def by_hand(fit, params, batches):
    fit = jax.jit(fit)
    for x, y in batches:
        ends = [fit(params, row)[0] for row in zip(x, y)]
        params = jax.tree.map(lambda *leaves: sum(leaves) / 4, *ends)
    return params


def gaussian_process(model, batch):
    return gpjax.fit(
        model=model,
        objective=lambda model, data: -gpjax.objectives.conjugate_mll(model, data),
        train_data=gpjax.Dataset(*batch),
        optim=optax.adam(1e-2),
        num_iters=10,
        verbose=False,
    )


def least_squares(params, batch):
    loss_of = lambda params, x, y: jnp.square(x @ params["w"] + params["b"] - y).mean()
    return jaxopt.GradientDescent(loss_of, maxiter=10).run(params, *batch)


def main(rounds: int = 4):
    batches = [(x, y) for x, y, _ in batches_of(rounds, 4)]
    prior = gpjax.gps.Prior(
        mean_function=gpjax.mean_functions.Constant(), kernel=gpjax.kernels.RBF()
    )
    starts = {
        gaussian_process: prior * gpjax.likelihoods.Gaussian(),
        least_squares: {"w": jnp.zeros([4, 1]), "b": jnp.zeros(1)},
    }
    for fit, start in starts.items():
        theirs = by_hand(fit, start, batches)
        compare(fit.__name__, theirs, with_workers(fit, start, batches))


if __name__ == "__main__":
    main()
