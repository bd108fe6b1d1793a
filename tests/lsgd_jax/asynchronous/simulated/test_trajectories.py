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
    "pulls-adpsgd": (Pulls(lj.adpsgd()), {}),
    "pulls-lsgd-budget": (Pulls(lj.lsgd(**LEVELS), budget=True), REJOIN),
    "pulls-diloco-int8": (Pulls(lj.diloco(4, delay=2, wire="int8")), {}),
    "pulls-local_sgd": (Pulls(lj.local_sgd(3)), REJOIN),
    "lsgd": (LSGD(0.5, 0.25, local_period=2, global_period=4), LOSS),
    "lsgd-int8": (LSGD(0.5, 0.25, local_period=2, global_period=4, wire="int8"), REJOIN),
    "diloco": (DiLoCo(4, **OUTER, together=True), REJOIN),
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


# Two workers are not finite once, while messages are in flight.
TRAINING = toys.broken(toys.broken(toys.training(), 2, steps=[5]), 3, steps=[3])
# For each case the seconds, the bytes that all have sent, the steps of each worker, the sum
# of its staleness over them, and its Σ k x_k.
RECORDED = """
pulls-adpsgd 28.85777686 2112 12,12,12,12 0,0,0,0 9.4729487 2.835482 -0.72939396 11.557595
pulls-lsgd-budget 25.01793786 760 19,15,12,6 0,0,0,0 14.123424 8.4940623 13.469353 13.469354
pulls-diloco-int8 27.84737686 0 12,12,12,12 0,0,0,0 8.5927747 8.5927748 8.5927745 8.5927747
pulls-local_sgd 25.13652887 504 12,12,12,12 0,0,0,0 2.7581135 2.7581134 2.7581138 2.7581135
lsgd 17.39485442 320 15,10,16,7 0,6,8,2 14.18848 12.546247 10.589526 18.549787
lsgd-int8 18.89524477 94 16,15,16,8 0,0,8,3 14.180833 11.030961 -11.832251 20.486778
diloco 30.40812446 680 15,12,14,9 8,1,7,7 9.9908276 9.1367032 -1.0167392 11.798241
diloco-int8 17.39485442 234 15,10,16,7 22,15,20,15 7.0650516 4.6758735 -7.7374975 12.377974
decoupled 17.39485442 768 15,10,16,7 26,8,27,5 10.23637 5.3441027 -12.716354 7.0759513
decoupled-int8 17.39485442 366 15,10,16,7 26,8,28,5 10.256083 5.3818461 -14.121918 7.1189799
adpsgd 17.39485442 2200 15,10,16,7 15,0,16,4 13.036761 -5.7907723 -10.478794 16.507896
adpsgd-int8 18.89524477 540 16,15,16,8 16,0,16,5 8.9096073 7.5798 -13.33069 16.590155
pairwise 17.39485442 1640 15,10,16,7 13,9,14,6 4.919939 3.2742937 3.9003924 19.120447
clock-int8 17.39485442 864 15,10,16,7 15,10,16,7 7.3858826 7.2751592 3.3642735 9.0583057
wagma 23.49524477 1800 15,14,17,8 21,10,40,10 4.853783 4.4956813 1.368049 4.1880013
wagma-int8 25.34373944 936 12,12,15,13 17,20,43,7 9.6335815 6.9632872 -1.3227595 2.7312668
osgp 28.70157421 1400 12,12,12,12 12,12,12,12 1.3034971 4.0832381 -15.04356 14.987138
osgp-int8 28.63161454 378 12,12,12,12 12,5,12,12 2.1629091 0.20439193 -2.3704942 7.8213246
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
