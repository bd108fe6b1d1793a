"""The table of methods is complete and has the defaults of the library."""

import dataclasses
import inspect
import pickle
import typing

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import train

import lsgd_jax as lj
from configs.digits import CONFIG
from train.config import OptimizerConfig, methods
from train.config.methods import METHODS, ROWS
from train.task.experiment import make_optimizer


METHODS_OF_THE_LIBRARY = "lsgd_jax._src.methods", "lsgd_jax._src.contrib"


def factories():
    """Yields the functions of the library that return a transformation."""
    for name, value in {**vars(lj), **vars(lj.robust), **vars(lj.contrib)}.items():
        module = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) and module.startswith(METHODS_OF_THE_LIBRARY):
            returned = typing.get_type_hints(value)["return"]
            is_class = inspect.isclass(returned)
            if is_class and issubclass(returned, optax.GradientTransformation):
                yield name, value


def test_the_table_holds_every_factory_of_the_library():
    listed = {factory for row in ROWS for factory in (row.first, row.last, row.around)}
    found = dict(factories())
    assert len(found) >= 17 and set(found.values()) <= listed


# Parameters of transformations that are given by the trainer, or accept only objects.
TRANSFORMATIONS_ONLY = {"axes", "base", "learning_rate"}
TRANSFORMATIONS_ONLY |= {"averaged", "guard", "moments", "tokens"}


@pytest.mark.parametrize("name", METHODS)
def test_options_are_the_parameters_of_the_factories_with_their_defaults(name):
    method, row = methods.make(name), METHODS[name].row
    expected = {}
    for function in row.functions:
        # A sequence in lock step, a choice of words for asynchronous workers.
        left_out = set() if inspect.isclass(function) else {"weights"}
        left_out |= TRANSFORMATIONS_ONLY
        left_out |= {name for name, made in row.made.items() if made is not function}
        left_out |= {"verify"} if row.asynchronous else set()
        for parameter in inspect.signature(function).parameters.values():
            option = row.renamed.get(parameter.name, parameter.name)
            if option not in left_out:
                defaults = {**methods.DEFAULTS, **row.defaults}
                default = defaults.get(parameter.name, parameter.default)
                expected[option] = default
    found = vars(method)
    if "topology" in found:
        found = found | {"topology": methods.TOPOLOGIES[method.topology]}
    assert found == expected
    assert pickle.loads(pickle.dumps(method)) == method
    if method.is_asynchronous:  # the engine exchanges, not the optimizer
        assert isinstance(method.asynchronous().window, int)
        assert not lj.diagnostics(method.around(optax.sgd(0.1)).init(jnp.zeros(3)))


@pytest.mark.slow
def test_a_part_of_the_parameters_is_chosen_by_paths():
    (pull,) = methods.make("local-sgd", part="!head").exchanges(1.0).pulls
    assert pull.part("body/kernel") and not pull.part("head/kernel")
    x = {"body": jnp.zeros(1), "head": jnp.zeros(1)}
    tx = methods.make("local-sgd", period=1, part="!head").around(optax.sgd(0.1))
    workers = lj.Workers(1, 2)
    ones = workers.put({"body": np.array([[1.0], [3.0]]), "head": np.array([[1.0], [3.0]])})
    x = workers.replicate(x)
    updates, _ = workers.map(tx.update)(ones, workers.map(tx.init)(x), x)
    np.testing.assert_allclose(updates["body"], [[-0.2], [-0.2]], rtol=1e-6)
    np.testing.assert_allclose(updates["head"], [[-0.1], [-0.3]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, factory, options",
    [
        ("diloco", lj.diloco, {}),
        # Without skipped steps, which need a loop that knows them.
        ("palsgd", lj.contrib.palsgd, {"probability": 0.0}),
    ],
)
def test_the_outer_optimizer_is_that_of_the_library(name, factory, options):
    """The default options give the same steps as no outer optimizer."""
    made = methods.make(name, period=1, verify=False, **options)
    given = steps_of(made.around(optax.sgd(0.1)))
    default = steps_of(optax.chain(optax.sgd(0.1), factory(period=1, **options)))
    np.testing.assert_array_equal(given, default)


def steps_of(tx, gradients=(1.0, 3.0), steps=5):
    """Parameters [steps, W] of workers with constant gradients that start at 0."""
    workers, g = lj.Workers(1, len(gradients)), np.array(gradients, np.float32)
    return np.stack(train(tx, workers, 0 * g, [g] * steps, [g] * steps)[0])


def configured(method, optimizer):
    return make_optimizer(dataclasses.replace(CONFIG, method=method, optimizer=optimizer))


DROPS = OptimizerConfig(learning_rate=1.0, schedule="drops", drop_at=(1,))


def test_slowmo_uses_the_learning_rate_of_its_step():
    # m = 1, then 0.5 m + 0.1 / 0.1 = 1.5; the second outer step is 0.1 m.
    method = methods.make("slowmo", period=1, alpha=1.0, beta=0.5)
    seen = steps_of(configured(method, DROPS), gradients=(1.0,), steps=2)
    np.testing.assert_allclose(seen[:, 0], [-1.0, -1.15], rtol=1e-6)


@pytest.mark.slow
def test_parle_follows_its_equation_while_the_learning_rate_drops():
    """Inner and outer loop use the learning rate of the base optimizer at each step."""
    gradients, decay, gamma, rho, period = np.array([1.0, 3.0]), 0.5, 0.2, 0.3, 2
    optimizer = OptimizerConfig(
        learning_rate=0.5, schedule="drops", drop_at=(2, 3), drop_factor=0.5
    )
    method = methods.make("parle", period, gamma, rho, decay)
    seen = steps_of(configured(method, optimizer), tuple(gradients), steps=6)
    y, anchor, average, center = np.zeros((4, 2))
    for t, eta in enumerate((0.5, 0.5, 0.25, 0.125, 0.125, 0.125), start=1):
        y = y - eta * gradients - eta * gamma * (y - anchor)
        average = decay * average + (1 - decay) * y
        if t % period == 0:
            anchor = anchor - eta * ((anchor - average) + rho * (anchor - center))
            y, average, center = anchor, anchor, anchor.mean()
        np.testing.assert_allclose(seen[t - 1], y, rtol=1e-5)


def test_clipping_follows_the_aggregation():
    """The mean gradient 2 is clipped, not the gradients 1 and 3 of the workers."""
    optimizer = OptimizerConfig(learning_rate=1.0, clip=1.5)
    seen = steps_of(configured(methods.make("allreduce"), optimizer), steps=1)
    np.testing.assert_allclose(seen, [[-1.5, -1.5]])


@pytest.mark.parametrize(
    "name, options, step",
    [
        ("diloco", {"period": 8}, 8),
        ("diloco", {"period": 8, "fragments": 2}, 4),
        ("palsgd", {"period": 8}, 8),
        ("overlapped-diloco", {"period": 8, "delay": 3}, 8),
        ("lsgd", {"local_period": 6, "global_period": 4}, 4),
        ("desloc", {"period": 5}, 5),
        ("async-lsgd", {"local_period": 6, "global_period": 9, "blocking": False}, 6),
        ("async-lsgd", {"local_period": 6, "global_period": 9}, 6),
        ("async-diloco", {"local_steps": 7}, 7),
        ("decoupled-diloco", {"local_steps": 8, "fragments": 4}, 2),
        ("dpsgd", {}, 1),
        ("async-wagma", {}, 1),
        ("krum", {}, 1),
        ("independent", {}, None),
    ],
)
def test_the_first_exchange(name, options, step):
    assert methods.make(name, **options).first_exchange() == step


@pytest.mark.parametrize("default", [0.5, 2, None])
def test_one_option_of_two_factories_has_one_default(default):
    """One of them would silently get the default of the other."""

    def first(strength: float = 1.0): ...

    def last(strength: float | None = default): ...

    with pytest.raises(ValueError, match="both has two options `strength`: that of last "):
        methods._class(methods.Row("both", last, first))
    last.__annotations__ = first.__annotations__
    given = methods.Row("both", last, first, defaults={"strength": 3.0})
    assert methods._class(given)().strength == 3.0
    renamed = methods.Row("both", last, renamed={"strength": "own"})
    assert dataclasses.fields(methods._class(renamed))[0].name == "own"
