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
    "clock-int8": (Pairwise("clock", wire="int8"), {}),
    "wagma": (WAGMA(2, sync_period=8), REJOIN),
    "wagma-int8": (WAGMA(2, sync_period=8, wire="int8"), LOSS),
    "osgp": (OSGP(), LOSS),
    "osgp-int8": (OSGP(wire="int8"), REJOIN),
}


# One worker is not finite once, while messages are in flight.
TRAINING = toys.broken(toys.training(), 2, steps=[5])
# For each case the seconds, the bytes that all have sent, the steps of each worker, the sum
# of its staleness over them, and its Σ k x_k.
RECORDED = """
pulls-lsgd 29.23937686 720 12,12,12,12 0,0,0,0 15.876772 11.109813 15.876771 23.662706
pulls-lsgd-budget 25.01793786 760 19,15,12,6 0,0,0,0 14.123424 8.4940623 13.469354 20.288791
pulls-diloco-int8 27.84737686 0 12,12,12,12 0,0,0,0 8.2620234 8.2620235 8.2620234 8.2620237
pulls-local_sgd 25.13652887 504 12,12,12,12 0,0,0,0 2.7581135 2.7581134 2.7581138 2.7581135
lsgd 17.39485442 400 15,10,16,7 0,6,8,2 14.18848 12.546247 8.9080147 22.470946
lsgd-int8 18.89524477 108 16,15,16,8 0,0,8,3 14.180833 11.030961 1.557667 23.495782
diloco 21.24670972 1200 16,14,15,7 20,8,20,17 7.5679154 7.8180002 -5.7024793 7.8483607
diloco-int8 17.39485442 648 15,10,16,7 22,15,20,18 7.3408305 5.0169511 -7.5083804 12.682136
decoupled 17.39485442 768 15,10,16,7 26,8,27,5 10.23637 5.3441027 -12.716354 7.0759513
decoupled-int8 17.39485442 366 15,10,16,7 26,8,28,5 10.256083 5.3818461 -14.121918 7.1189799
adpsgd 17.39485442 2120 15,10,16,7 15,0,16,0 15.593502 -5.7907723 -10.478794 18.979362
adpsgd-int8 18.89524477 504 16,15,16,8 16,0,16,0 9.7720812 10.33806 -11.953179 17.195982
pairwise 17.39485442 1640 15,10,16,7 13,9,14,6 5.4234231 3.2742937 4.3332182 19.077117
clock-int8 17.39485442 864 15,10,16,7 15,10,16,7 7.920507 7.9695328 3.7174568 9.6821253
wagma 23.49524477 1800 15,14,17,8 21,10,40,10 5.3174127 5.0340113 1.811653 4.6699783
wagma-int8 25.34373944 936 12,12,15,13 17,20,43,7 9.7949129 7.1002615 -1.0965329 2.9864939
osgp 28.70157421 1400 12,12,12,12 12,12,12,12 1.3848004 4.1886446 -15.048017 15.111527
osgp-int8 28.63161454 378 12,12,12,12 12,5,12,12 2.1629091 0.20439193 -2.3704942 7.7861116
"""


def found(name):
    method, options = CASES[name]
    note, staleness = toys.noting(lambda worker: worker.report.staleness)
    run = simulator.run(
        TRAINING, method, 2, 2, 12, NETWORK, SPEEDS, observe=note, **options
    )
    x = toys.stacked(run.workers).astype(np.float64)
    row = [f"{run.seconds:.10g}", f"{sum(w.report.bytes_sent for w in run.workers)}"]
    row.append(",".join(str(worker.count) for worker in run.workers))
    row.append(",".join(f"{sum(staleness[i]):g}" for i in range(4)))
    return row + [f"{value:.8g}" for value in x @ range(1, 11)]


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_one_that_was_recorded(name):
    rows = {row.split()[0]: row.split()[1:] for row in RECORDED.strip().splitlines()}
    expected = rows[name]
    run = found(name)
    assert run[:4] == expected[:4]
    # Another compiler may round the last bit of a term differently; terms are up to 12.
    x = [[float(value) for value in row[4:]] for row in (run, expected)]
    np.testing.assert_allclose(*x, rtol=1e-6, atol=2e-6)


if __name__ == "__main__":
    for name in CASES:
        print(name, *found(name))
