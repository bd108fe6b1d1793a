"""Recorded runs of the simulator: a change of the code alone changes no trajectory.

To record again, after a change that is meant: `python test_trajectories.py` in this folder.
"""

import numpy as np
import pytest
import toys

import lsgd_jax as lj
from lsgd_jax.asynchronous import (
    ADPSGD,
    LSGD,
    OSGP,
    WAGMA,
    DecoupledDiLoCo,
    DiLoCo,
    Network,
    Pairwise,
    Pulls,
    Speeds,
    simulator,
)


SPEEDS = Speeds(step=1.0, slow={1: 1.7, 3: 2.3}, jitter=0.1)
NETWORK = Network(bandwidth=1e3, latency=0.05, inside_bandwidth=1e4, inside_latency=0.01)
LEVELS = dict(local_pull=0.3, global_pull=0.2, local_period=2, global_period=4)
OUTER = dict(learning_rate=0.3, momentum=0.3)
LOSS = dict(loss=0.1, timeout=3.0)
REJOIN = dict(timeout=3.0, drops={1: 6.5}, joins={1: 12.25})

CASES = {
    "pulls-lsgd": (Pulls(lj.lsgd(**LEVELS)), {}),
    "pulls-lsgd-budget": (Pulls(lj.lsgd(**LEVELS), budget=True), REJOIN),
    "pulls-diloco-int8": (Pulls(lj.diloco(4, delay=2, wire="int8")), {}),
    "pulls-local_sgd": (Pulls(lj.local_sgd(3)), REJOIN),
    "lsgd": (LSGD(0.5, 0.25, local_period=2, global_period=4), LOSS),
    "lsgd-int8": (LSGD(0.5, 0.25, local_period=2, global_period=4, wire="int8"), REJOIN),
    "diloco": (DiLoCo(4, **OUTER), REJOIN),
    "diloco-int8": (DiLoCo(4, **OUTER, delay=2, wire="int8"), LOSS),
    "decoupled": (DecoupledDiLoCo(4, **OUTER), LOSS),
    "decoupled-int8": (DecoupledDiLoCo(4, **OUTER, wire="int8"), {}),
    "adpsgd": (ADPSGD(), LOSS),
    "adpsgd-int8": (ADPSGD(wire="int8"), REJOIN),
    "pairwise": (Pairwise("loss"), LOSS),
    "pairwise-int8": (Pairwise(wire="int8"), {}),
    "wagma": (WAGMA(2, sync_period=8), REJOIN),
    "wagma-int8": (WAGMA(2, sync_period=8, wire="int8"), LOSS),
    "osgp": (OSGP(), LOSS),
    "osgp-int8": (OSGP(wire="int8"), REJOIN),
}


TRAINING = toys.training()
# For each case the seconds, the steps of each worker, and each worker's Σ k x_k.
RECORDED = """
pulls-lsgd 29.23937686002435 12,12,12,12 15.876772 11.109813 6.2403554 23.662706
pulls-lsgd-budget 25.017937864714256 19,15,12,6 14.123425 8.4940636 3.8966154 20.288792
pulls-diloco-int8 27.847376860024337 12,12,12,12 3.4195905 3.4195903 3.4195903 3.4195902
pulls-local_sgd 25.136528865978395 12,12,12,12 -1.0682249 -1.0682249 -1.0682247 -1.0682249
lsgd 17.394854423210596 15,10,16,7 14.18848 12.546247 -8.517975 4.6504649
lsgd-int8 18.895244771847345 16,15,16,8 14.180833 11.030961 -15.030522 7.6133166
diloco 21.246709716466686 16,14,15,7 5.7094941 5.9817591 -6.6915732 6.0068437
diloco-int8 17.394854423210596 15,10,16,7 7.2663049 4.8533593 -7.7145489 12.510726
decoupled 17.394854423210596 15,10,16,7 9.1711625 4.3478661 -13.781562 6.0797141
decoupled-int8 17.394854423210596 15,10,16,7 9.190875 4.3856093 -15.187126 6.1227425
adpsgd 17.394854423210596 15,10,16,7 14.817237 -6.0942684 -10.997425 18.276692
adpsgd-int8 18.895244771847345 16,15,16,8 8.9289353 8.4541134 -12.515919 16.87145
pairwise 17.394854423210596 15,10,16,7 2.9194768 -0.24017581 1.9142044 18.723126
pairwise-int8 17.394854423210596 15,10,16,7 7.6346136 7.7521828 3.973497 9.3155223
wagma 23.495244771847354 15,14,17,8 4.8156144 4.4472556 1.2705421 4.0518307
wagma-int8 25.343739436664826 12,12,15,13 9.7278025 7.0519974 -1.0714813 2.9505712
osgp 28.701574214539775 12,12,12,12 1.4323391 4.1861977 -14.885949 15.172978
osgp-int8 28.631614540099303 12,12,12,12 -1.0186654 -0.61348511 -5.58305 5.8788306
"""


def found(name):
    method, options = CASES[name]
    run = simulator.run(TRAINING, method, 2, 2, 12, NETWORK, SPEEDS, **options)
    x = toys.stacked(run.workers).astype(np.float64)
    steps = ",".join(str(worker.count) for worker in run.workers)
    return [repr(run.seconds), steps, *(f"{value:.8g}" for value in x @ range(1, 11))]


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_one_that_was_recorded(name):
    rows = {row.split()[0]: row.split()[1:] for row in RECORDED.strip().splitlines()}
    expected, run = rows[name], found(name)
    assert run[:2] == expected[:2]
    # Another compiler may round the last bit of a term differently; terms are up to 12.
    x = [[float(value) for value in row[2:]] for row in (run, expected)]
    np.testing.assert_allclose(*x, rtol=1e-6, atol=2e-6)


if __name__ == "__main__":
    for name in CASES:
        print(name, *found(name))
