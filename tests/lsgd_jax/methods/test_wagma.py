"""WAGMA on groups that a round of its butterfly does not fill."""

import numpy as np
from harness import close, everywhere, make, mean

import lsgd_jax as lj


def test_wagma_with_groups_that_do_not_fill_a_round():
    """W = 8, S = 4: groups {0..3}, {4..7}, then pairs i, i + 4."""
    run = make(lj.wagma(4, 100), 8)
    seen, _ = run.still(3, run.start)
    first = run.start["w"].reshape(2, 4, 3, 2).mean(axis=1)
    close(seen[0]["w"], np.repeat(first, 4, axis=0))
    close(seen[1], everywhere(mean(run.start), 8))
