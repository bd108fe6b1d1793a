"""Every method reproduces its oracle, with any number of workers per device."""

import inspect

import chex
import jax
import optax
import pytest
from harness import in_turn, mostly_slow, train

import lsgd_jax as lj
import oracles


# By default those of methods that have no other oracle, and whose equations their own tests
# do not compute by hand, with a worker on each device, which compiles fastest. Some have an
# odd number of workers.
QUICK = "slowmo diloco_late sgp_exponential pairwise_clock cge".split()
QUICK += "sparseloco_2bit-3 noloco-3 edit_layer-3".split()
QUICK = [(name, 8) for name in QUICK]
REST = [name for name in oracles.NAMES if (name, 8) not in QUICK]
EACH = QUICK + in_turn(REST, (8, 1, 2, 4))


# `test_numbers_do_not_depend_on_the_devices` runs every method on others, too.
@pytest.mark.parametrize("name, devices", mostly_slow(EACH, fast=QUICK))
def test_oracle(name, devices):
    case = oracles.load(name)
    count = case.workers
    while count % devices:
        devices //= 2
    workers = lj.Workers(
        case.nodes, case.locals, devices=jax.devices()[: min(devices, count)]
    )
    steps = range(len(case.losses))
    gradients = [oracles.at(case.gradients, t) for t in steps]
    expected = [oracles.at(case.expected, t) for t in steps]
    seen, _ = train(case.tx, workers, case.start, gradients, case.losses)
    chex.assert_trees_all_close(seen, expected, rtol=case.rtol, atol=case.atol)


def test_every_method_has_an_oracle():
    covered = {oracles.load(name).method for name in oracles.NAMES}
    assert covered == set(methods())


def methods():
    """Yields the public names of the methods: what goes into a chain and communicates."""
    kinds = optax.GradientTransformation, lj.Exchange
    builders = {"exchange", "aggregate", "with_state"}
    for prefix, module in {"": lj, "contrib.": lj.contrib, "robust.": lj.robust}.items():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and name not in builders:
                returned = inspect.signature(value).return_annotation
                if isinstance(returned, type) and issubclass(returned, kinds):
                    yield prefix + name


@pytest.mark.parametrize("name", ["diloco-5", ""])
def test_an_unknown_oracle_is_refused(name):
    with pytest.raises(ValueError, match="`name` must be one of lsgd_single_leader, "):
        oracles.load(name)
