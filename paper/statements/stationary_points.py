r"""LSGD's leader comes to rest at a stationary point of f, EASGD's workers do not.

At a fixed point of the LGD step with a leader l, the one worker with the lowest f,

.. math:: \nabla f(x_l) = 0, \qquad \nabla f(x_i) = -\lambda (x_i - x_l),

so the leader is at a stationary point of f itself. At a fixed point of EASGD with workers
in different basins of f,

.. math:: \nabla f(x_i) = -\rho (x_i - c) \ne 0, \qquad c = \frac{1}{W} \sum_j x_j,

so no worker is. (λ and ρ are the pulls per unit of the learning rate.)

Checked on random tilted double wells in the plane, f(x) = Σ_k ¼(x_k² − 1)² + a_k x_k,
with a worker in each of the four basins.

Paper: section on stationary points (theorem on LSGD's objective).
"""

import jax
import jax.numpy as jnp
import numpy as np

from paper.descent import descent, easgd, lgd
from paper.statements.claim import Claim, Findings


RATE, PULL = 0.1, 0.08  # η; λ = ρ
CORNERS = np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)], float)
METHODS = {
    "LSGD": lgd(RATE, RATE * PULL),
    "EASGD": easgd(RATE, RATE * PULL * len(CORNERS)),
}


def wells(x: jax.Array | np.ndarray, tilt: jax.Array | np.ndarray) -> jax.Array:
    """Returns f [...] at x [..., 2] with the tilt a [..., 2]."""
    return jnp.sum(jnp.square(jnp.square(x) - 1) / 4 + tilt * x, axis=-1)


def settle(method: str, starts: np.ndarray, tilts: np.ndarray, steps: int) -> np.ndarray:
    """Returns the positions of the workers [instances, 4, 2] after so many steps."""
    wells_of = jax.value_and_grad(wells)
    run = descent(lambda tilt: METHODS[method], lambda x, k, tilt: wells_of(x, tilt), steps)
    return run(starts, (tilts,))[1]


def settle_literally(starts: np.ndarray, tilts: np.ndarray, steps: int) -> np.ndarray:
    """Does the same on Σ_i f(x_i) + λ/2‖x_i − x_l‖², with a gradient through x_l."""

    def objective(x, tilt):
        values = wells(x, tilt[None])
        gaps = x - x[jnp.argmin(values)][None]
        return values.sum() + PULL / 2 * jnp.square(gaps).sum()

    def run(x, tilt):

        def one(x, _):
            return (x - RATE * jax.grad(objective)(x, tilt), None)

        return jax.lax.scan(one, x, length=steps)[0]

    return np.asarray(jax.jit(jax.vmap(run))(starts, tilts))


def gradients(x: np.ndarray, tilts: np.ndarray) -> np.ndarray:
    """Returns ∇f at every worker, shaped like x."""
    return x**3 - x + tilts[:, None]


def led_apart(x: np.ndarray, tilts: np.ndarray) -> np.ndarray:
    """Selects the instances that have one leader and a worker in each basin: a mask."""
    first, second = np.sort(wells(x, tilts[:, None]), axis=1)[:, :2].T
    basins = [len(set(map(tuple, np.sign(one)))) for one in x]
    return (second - first > 1e-6) & (np.array(basins) == len(CORNERS))


def norms(x: np.ndarray) -> np.ndarray:
    """Returns the length of every worker's vector."""
    return np.linalg.norm(x, axis=-1)


def leader_of(x: np.ndarray, tilts: np.ndarray) -> np.ndarray:
    """Returns the position of each instance's leader, [instances, 1, 2]."""
    first = np.argmin(wells(x, tilts[:, None]), axis=1)
    return np.take_along_axis(x, first[:, None, None], axis=1)


def check(seed: int = 0, landscapes: int = 200, steps: int = 3000) -> Findings:
    """Runs both methods in random landscapes until they are at rest."""
    rng = np.random.default_rng(seed)
    tilts = rng.uniform(0.02, 0.2, (landscapes, 2))
    starts = CORNERS[None] * rng.uniform(0.7, 1.3, (landscapes, *CORNERS.shape))
    starts = np.stack([one[rng.permutation(len(CORNERS))] for one in starts])

    ends = {name: settle(name, starts, tilts, steps) for name in METHODS}
    x = ends["LSGD"]
    kept = led_apart(ends["LSGD"], tilts)
    first = leader_of(x, tilts)
    at_leader = norms(gradients(first, tilts))[kept]
    balance = norms(gradients(x, tilts) + PULL * (x - first))[kept]

    y = ends["EASGD"]
    apart = led_apart(ends["EASGD"], tilts)
    center = y.mean(axis=1, keepdims=True)
    elastic = norms(gradients(y, tilts) + PULL * (y - center))[apart]
    at_workers = norms(gradients(y, tilts))[apart]
    shortest = PULL * norms(y - center)[apart]

    z = settle_literally(starts, tilts, steps)
    unlike = norms(gradients(leader_of(z, tilts), tilts))[led_apart(z, tilts)]

    def worst(found):
        return float(found.max()) if found.size else float("nan")

    def least(found):
        return float(found.min()) if found.size else float("nan")

    claims = [
        Claim(
            "LSGD at rest, one leader: ∇f(leader) = 0",
            f"‖∇f(leader)‖, worst of {kept.sum()} landscapes",
            worst(at_leader),
            tolerance=1e-12,
        ),
        Claim(
            "LSGD at rest: ∇f(x_i) = −λ(x_i − leader)",
            f"‖∇f + λ(x_i − leader)‖, worst of {balance.size} workers",
            worst(balance),
            tolerance=1e-12,
        ),
        Claim(
            "EASGD at rest in different basins: ∇f(x_i) = −ρ(x_i − c)",
            f"‖∇f + ρ(x_i − c)‖, worst of {elastic.size} workers",
            worst(elastic),
            tolerance=1e-12,
        ),
        Claim(
            "EASGD at rest in different basins: ∇f(x_i) ≠ 0",
            f"‖∇f(x_i)‖, least of {at_workers.size} workers, against the least ρ‖x_i − c‖",
            least(at_workers),
            least(shortest),
            1e-12,
            "≥",
        ),
    ]
    remarks = [
        "LSGD's step differentiates the objective Σ f(x_i) + λ/2‖x_i − leader‖² with the "
        "leader held fixed. With a gradient through the leader as well, its stationary "
        "points have ∇f(leader) = λΣ(x_i − leader), which is not 0: gradient descent came "
        f"to rest with ‖∇f(leader)‖ ≥ {least(unlike):.2g} in {unlike.size} landscapes."
    ]
    return Findings(claims, remarks)
