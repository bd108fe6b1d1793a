"""NumPyro: `svi.update` with an AutoGuide and an optimizer of optax.

Four workers with different data. One worker alone equals plain NumPyro. Tested with
numpyro 0.22.0 and jax 0.10.2.
"""

import jax
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from own_loop import batches_of, compare

import lsgd_jax as lj


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ slope, noise), obs=y)


def created():
    return SVI(model, AutoNormal(model), optax.adam(1e-2), Trace_ELBO())


def alone(key, batches):
    svi = created()
    state, update = svi.init(key, *batches[0]), jax.jit(svi.update)
    for batch in batches:
        state, loss = update(state, *batch)
    return svi.optim.get_params(state.optim_state)


def with_workers(keys, method, batches):
    svi, workers = created(), lj.Workers(nodes=len(keys), locals=1)  # new: workers
    step = lj.around(svi.update, method, params=("optim_state", 1, 0))  # new
    init = workers.map(lambda *args: step.init(svi.init(*args)))  # new
    state, update = init(keys, *batches[0]), workers.map(step, donate=0)  # new
    for batch in batches:
        state, loss = update(state, *workers.put(batch))  # new: put
    return svi.optim.get_params(state.state.optim_state)


def main(steps: int = 40):
    batches = [(x, y[..., 0]) for x, y, _ in batches_of(steps, 4)]
    keys, method = jax.random.split(jax.random.key(3), 4), lj.local_sgd(period=8)
    rows = lambda i: [(x[i], y[i]) for x, y in batches]
    lj.checks.check_workers_agree(with_workers(keys, method, batches))

    theirs = [alone(key, rows(i)[:8]) for i, key in enumerate(keys)]
    theirs = jax.tree.map(lambda *x: sum(x) / 4, *theirs)
    compare("a mean of NumPyro", theirs, with_workers(keys, method, batches[:8]))
    one = with_workers(keys[:1], method, [(x[:1], y[:1]) for x, y in batches])
    compare("NumPyro", alone(keys[0], rows(0)), one)


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
