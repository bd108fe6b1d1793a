"""torch's model averagers: the parameters that its distributed tests expect.

pytorch/pytorch (BSD-3-Clause), commit a069159c00b60fc660b36e63b9863cb6b30cda16,
torch/testing/_internal/distributed/distributed_test.py, test_periodic_model_averager and
test_3_level_hierarchical_model_averager. Each worker stands at its rank before every step,
and its own step does not move it. Compared: the parameters of 4 workers after every step.

torch counts steps from 0 and starts with an average after its warm-up. Here an offset and a
schedule say the same.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import train

import lsgd_jax as lj


RANKS, PAIRS, ALL = [0, 1, 2, 3], [0.5, 0.5, 2.5, 2.5], [1.5] * 4


def after_warmup(warmup, t):
    return jnp.where(t > warmup, 1.0, 0.0)


def averaged(method, start, count):
    """The trees after each of so many steps, leaves [4]."""
    workers = lj.Workers(2, 2)
    back = lambda x, start: jax.tree.map(jnp.subtract, start, x)
    return train(method, workers, start, [start] * count, gradient=back)[0]


@pytest.mark.slow
def test_periodic():
    """Period 4 after a warm-up of 12, 13, 14 and 15 steps, each on a leaf of its own."""
    warmups = {f"after {warmup}": warmup for warmup in (12, 13, 14, 15)}
    pull = lambda name, warmup: lj.Pull(
        lj.rules.average(),
        functools.partial(after_warmup, warmup),
        every=4,
        offset=(warmup + 1) % 4,
        part=[name],
    )
    method = lj.exchange(*(pull(*each) for each in warmups.items()))
    start = {name: np.array(RANKS, np.float32) for name in warmups}
    for step, seen in enumerate(averaged(method, start, 20)):
        for name, warmup in warmups.items():
            is_due = step >= warmup and (step - warmup) % 4 == 0
            assert seen[name].tolist() == (ALL if is_due else RANKS)


@pytest.mark.slow
def test_hierarchical():
    """Pairs every 2 steps, all workers every 4 and 8, after a warm-up of 10 steps."""
    begin = functools.partial(after_warmup, 10)
    levels = {2: "local", 4: ("node", "local"), 8: ("node", "local")}
    method = lj.exchange(
        *(lj.Pull(lj.rules.average(axes), begin, n, offset=1) for n, axes in levels.items())
    )
    expected = {step: PAIRS for step in (10, 14, 18, 22)}
    expected |= {step: ALL for step in (12, 16, 20, 24)}
    for step, seen in enumerate(averaged(method, np.array(RANKS, np.float32), 25)):
        assert seen.tolist() == expected.get(step, RANKS)
