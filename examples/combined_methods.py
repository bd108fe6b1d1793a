"""Two combinations of LSGD and DiLoCo: one method per level, and a rule of both.

    python examples/combined_methods.py

`two_levels` is LSGD inside a node and DiLoCo across: `lj.exchange` composes exchanges.
`diloco_leader` is DiLoCo whose outer step follows the leader in place of the mean. Its rule
is `lj.rules.anchored` with an election. Four workers in two nodes descend from 0 to the
goals 1, 2, 4 and 9. The losses are squared distances, so the leader has the goal 1.
The program prints the workers after 20 steps:

    two levels: 2.209 3.629 2.209 3.629
    diloco with a leader: 0.863 0.863 0.863 0.863
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


GOALS = np.array([1.0, 2.0, 4.0, 9.0])


def two_levels(
    pull=0.1, local_period=16, period=64, outer=None, loss_window=10
) -> lj.Exchange:
    """LSGD inside a node, and DiLoCo across nodes among workers with the same index."""
    inside = lj.lsgd(pull, 0.0, local_period, loss_window=loss_window)
    return lj.exchange(inside, lj.diloco(period, outer, axes="node"))


class LedState(NamedTuple):
    """The election, and the anchor with the state of its outer optimizer."""

    election: lj.LeaderState
    anchor: lj.AnchorState

    @property
    def leader(self):
        """The leader at the last election, for `lj.diagnostics`."""
        return self.election.leader


def led(outer, axes=("node", "local"), window=10) -> lj.rules.Rule:
    r"""The rule of an anchor that an outer optimizer moves toward the leader l.

    .. math:: \Delta = a - y_l, \qquad a \leftarrow a + \text{outer}(\Delta), \qquad z = a
    """
    outer = optax.with_extra_args_support(outer)
    leader = lj.rules.leader(axes, window)
    anchored = lj.rules.anchored(outer, axes)

    def init(params):
        return LedState(leader.init(params), anchored.init(params))

    def step(u, x, state, loss, t):
        u, election, fit = leader.step(u, x, state.election, loss, t)
        return u, state._replace(election=election), fit

    def agree(group, x, y, state, fit, t):
        best, found, election = leader.agree(group, x, y, state.election, fit, t)
        anchor = state.anchor.anchor.value
        before = state.anchor.outer.value
        move, moved = outer.update(optax.tree.sub(anchor, best), before, anchor)
        after = optax.apply_updates(anchor, move), moved
        # Without a finite worker there is no leader, and the anchor stays.
        keep = lambda new, old: jnp.where(found, new, old)
        chosen = jax.tree.map(keep, after, (anchor, before))
        state = LedState(election, lj.AnchorState(*map(group.shared, chosen)))
        return chosen[0], jnp.asarray(True), state

    return lj.rules.Rule(axes, init, agree, step)


def diloco_leader(period=64, outer=None, loss_window=10) -> lj.Exchange:
    """DiLoCo with a leader. `outer` defaults to the outer optimizer of `lj.diloco`."""
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    return lj.exchange(lj.Pull(led(outer, window=loss_window), 1.0, every=period))


def train(method, steps):
    """Trains four workers; returns x [steps, 4] and the diagnostics of each pull."""
    workers = lj.Workers(nodes=2, locals=2)
    tx = optax.chain(optax.sgd(0.1), method)

    def step(x, state, goal):
        loss = (x - goal) ** 2
        gradient = 2 * (x - goal)
        updates, state = tx.update(gradient, state, x, value=loss)
        return lj.apply_updates(x, updates), state

    x = workers.put(jnp.zeros(4))
    goals = workers.put(jnp.asarray(GOALS, jnp.float32))
    state = workers.map(tx.init)(x)
    seen = []
    step = workers.map(step)
    for _ in range(steps):
        x, state = step(x, state, goals)
        seen.append(np.asarray(x))
    return np.stack(seen), lj.diagnostics(state)


def main():
    """Trains with both methods and prints the last parameters of all workers."""
    outer = optax.sgd(0.5)
    methods = {
        "two levels": two_levels(0.25, 2, 4, outer, loss_window=1),
        "diloco with a leader": diloco_leader(2, outer, loss_window=1),
    }
    for name, method in methods.items():
        seen, _ = train(method, steps=20)
        print(f"{name}: {' '.join(f'{x:.3f}' for x in seen[-1])}")


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
