"""Tests of the options that all methods which pull share."""

import dataclasses
import functools
import inspect
import itertools
import typing

import optax
import pytest

import lsgd_jax as lj


METHODS = {
    "lsgd": functools.partial(lj.lsgd, 0.1, 0.1, 4, 8),
    "easgd": functools.partial(lj.easgd, 0.4, 4),
    "downpour": functools.partial(lj.downpour, 4),
    "local_sgd": functools.partial(lj.local_sgd, 4),
    "diloco": functools.partial(lj.diloco, 4),
    "slowmo": functools.partial(lj.slowmo, 4),
    "parle": functools.partial(lj.parle, 0.1, 4),
    "noloco": functools.partial(lj.contrib.noloco, 4),
    "grawa": functools.partial(lj.contrib.grawa, 0.1, 4),
}
GIVEN = {
    "wire": "int8",
    "fragments": 2,
    "delay": 1,
    "late": "add",
    "after": 3,
    "part": ["a"],
    "scan_axis": 0,
    "memory": "host",
    "check": "every_step",
}


def settings(tx):
    own = ("rule", "strength")
    fields = [x.name for x in dataclasses.fields(lj.Pull) if x.name not in own]
    return tx.check, [[getattr(pull, field) for field in fields] for pull in tx.pulls]


@pytest.mark.parametrize("method", METHODS)
def test_an_option_of_a_method_is_an_option_of_its_exchange(method):
    make = METHODS[method]
    for r in (1, len(GIVEN) - 1):
        for names in itertools.combinations(GIVEN, r):
            if "late" in names and "delay" not in names:
                continue  # refused
            options = {name: GIVEN[name] for name in names}
            given, applied = make(**options), lj.exchange(make(), **options)
            assert settings(given) == settings(applied)
            assert names == ("scan_axis",) or settings(given) != settings(make())


def test_pulls_keep_the_options_that_are_not_given():
    inner = lj.diloco(8, wire="int8", fragments=2, check="every_step")
    assert settings(lj.exchange(inner)) == settings(inner)
    both = lj.exchange(inner, lj.local_sgd(4), delay=1)
    assert both.check == "every_step"
    assert [pull.wire for pull in both.pulls] == ["int8", "float32"]
    (heads,) = lj.exchange(inner, part=["head"]).pulls
    parts = [(each.part.index, each.part.part) for each in heads.each]
    assert parts == [(0, ["head"]), (1, ["head"])]


def test_options_stand_in_signatures_and_docstrings():
    for name in ("diloco", "lsgd", "dpsgd"):
        method = getattr(lj, name)
        shown = inspect.signature(method).parameters
        assert set(lj.rules.PullOptions.__annotations__) < set(shown)
        assert shown["wire"].default == "float32"
        documented = inspect.getdoc(method)
        assert "\n  delay: steps between the agreement" in documented
        assert "**options" not in documented
    assert "wire" not in inspect.signature(lj.contrib.sparta).parameters
    assert "wire:" not in inspect.getdoc(lj.contrib.sparta)
    assert lj.diloco(8) == lj.diloco(8, wire="float32", delay=0)


def test_a_method_of_the_user_takes_the_options():
    @lj.rules.takes_options(memory="it is short")
    def mine(period=4, **options):
        """Mine.

        Args:
          period: steps.
          **options: the others.
        """
        return lj.exchange(lj.Pull(lj.rules.average(), 1.0, every=period), **options)

    assert settings(mine(8, delay=1)) == settings(lj.local_sgd(8, delay=1))
    taken = ["period", *lj.rules.PullOptions.__annotations__]
    taken.remove("memory")
    assert list(inspect.signature(mine).parameters) == taken
    assert "\n  wire: the format" in inspect.getdoc(mine)
    assert typing.get_type_hints(mine).keys() == {*taken} - {"period"}
    with pytest.raises(ValueError, match="`mine` takes no `memory`: it is short"):
        mine(memory="host")
    with pytest.raises(TypeError, match=r"mine\(\) got an unexpected keyword argument 'w"):
        mine(wires="int8")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: lj.contrib.sparta(wire="int8"),
            ValueError,
            "`sparta` takes no `wire`: the values",
        ),
        (
            lambda: lj.contrib.sparse_diloco(wire="int8"),
            ValueError,
            "takes no `wire`: it is top-k",
        ),
        (
            lambda: lj.contrib.desloc(optax.adam(0.1), fragments=2),
            ValueError,
            "`desloc` takes no `fragments`: moments",
        ),
        (lambda: lj.rules.takes_options(wires=""), TypeError, "there is no option 'wires'"),
        (
            lambda: lj.rules.takes_options()(lambda period: lj.local_sgd(period)),
            TypeError,
            r"<lambda>\(\) must take \*\*options, as `takes_options` says",
        ),
        (lambda: lj.diloco(8, fragment=2), TypeError, r"diloco\(\) got an unexpected"),
        (lambda: lj.exchange(fragment=2), TypeError, "there is no option 'fragment'"),
        (lambda: lj.dpsgd(delay=1), ValueError, r"`delay` must be an int in \[0, 1\)"),
        (lambda: lj.wagma(fragments=2), ValueError, "`fragments` must divide the period"),
        (lambda: lj.diloco(8, fragments=3), ValueError, "of 8, which 1, 2, 4, 8 divide"),
        (
            lambda: lj.exchange(lj.diloco(8, fragments=2), fragments=2),
            ValueError,
            "`fragments` must be given once, got fragments=2 for pulls that are in 2",
        ),
        (
            lambda: lj.exchange(lj.diloco(8, fragments=2), delay=8),
            ValueError,
            r"`delay` must be an int in \[0, 8\)",
        ),
        (
            lambda: lj.local_sgd(8, delay=9, late="add"),
            ValueError,
            r"`delay` must be an int in \[0, 9\)",
        ),
        (
            lambda: lj.local_sgd(8, late="add"),
            ValueError,
            "`late` must be 'replace' without a delay",
        ),
        (
            lambda: lj.local_sgd(8, delay=1, late="added"),
            ValueError,
            "`late` must be one of 'replace', 'add'",
        ),
        (
            lambda: lj.exchange(lj.diloco(8, merge="radial"), wire="int8"),
            ValueError,
            "`wire` must be 'float32'",
        ),
        (
            lambda: lj.diloco(2, guard=lj.Guard(), weights=(1,)),
            ValueError,
            "`weights` must be None",
        ),
    ],
)
def test_refuses(build, error, message):
    with pytest.raises(error, match=message):
        build()
