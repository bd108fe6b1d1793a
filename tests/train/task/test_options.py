"""Options read from a function: names, types, defaults, help."""

from typing import Literal

import optax
import pytest

import lsgd_jax as lj
from train.task import methods, options


def factory(
    strength: optax.ScalarOrSchedule = 0.5,
    fragments: int = 1,
    until: int | None = None,
    rate: optax.ScalarOrSchedule | None = None,
    order: Literal["a", "b"] = "a",
    wire: lj.Wire | Literal["x", "y"] = "x",
    topology: object = lj.topology.bipartite_exponential,
    axes: tuple[str, ...] = ("node", "local"),
):
    r"""A method.

    Args:
      strength: λ, or a schedule of t.
      fragments: how many parts, which ``take``
        turns.
      until: the last step: or None.
      rate: :math:`\eta`.
      order: which first.
      wire: the format, or a `Wire`.
      topology: the graph.
      axes: of the mesh.

    Returns:
      Nothing: it is never called.
    """
    del strength, fragments, until, rate, order, wire, topology, axes


def test_every_kind_of_parameter():
    found = {option.name: option[1:] for option in options.read(factory, {"axes"})}
    graphs = Literal["ring", "exponential", "bipartite-exponential", "complete"]
    assert found == {
        "strength": (float, 0.5, "λ."),
        "fragments": (int, 1, "how many parts, which `take` turns."),
        "until": (int | None, None, "the last step: or None."),
        "rate": (float | None, None, r"\eta."),
        "order": (Literal["a", "b"], "a", "which first."),
        "wire": (Literal["x", "y"], "x", "the format."),
        "topology": (graphs, "bipartite-exponential", "the graph."),
    }


def test_a_new_parameter_of_a_factory_is_an_option():
    """No list but the row has to know of it."""
    made = methods._class(methods.Row("new", factory))
    assert made(fragments=3).fragments == 3 and made().topology == "bipartite-exponential"


def test_parameters_that_can_not_be_options():
    def without_default(period: int):
        """Args:
        period: τ.
        """

    def without_help(period: int = 1):
        pass

    def of_a_type(period: dict = {}):  # noqa: B006
        """One.

        Args:
          period: τ.
        """

    for function in (without_default, without_help):
        with pytest.raises(TypeError, match="default and help for 'period'"):
            options.read(function)
    with pytest.raises(TypeError, match="'period' is of a type that has no option"):
        options.read(of_a_type)
