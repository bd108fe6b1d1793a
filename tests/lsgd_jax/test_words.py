"""Words that users of other libraries try are answered with those that are meant."""

import inspect

import pytest

import lsgd_jax as lj
from lsgd_jax._src import words


TRIED = {
    "every": (lambda: lj.diloco(every=8), "did you mean `period=`, the steps between"),
    "outer_lr": (lambda: lj.diloco(outer_lr=0.7), r"mean `outer=optax.sgd\(learning_rate"),
    "compression": (lambda: lj.diloco(compression="int8"), "mean `wire=`, such as wire='i"),
    "an option": (lambda: lj.exchange(quantize=True), "mean `wire=`, such as wire='int8'"),
    "a slip": (lambda: lj.lsgd(local_priod=8), "did you mean `local_period=`?"),
    "workers": (lambda: lj.Workers(workers=8), "did you mean `nodes=` and `locals=`"),
    "unlike all": (lambda: lj.diloco(zzz=1), "got an unexpected keyword argument 'zzz'$"),
    "of another factory": (lambda: lj.lsgd(every=2), "keyword argument 'every'$"),
    "a class": (lambda: lj.DiLoCo, r"did you mean lsgd_jax.diloco\?"),
    "of torch": (lambda: lj.DistributedDataParallel, r"did you mean lsgd_jax.allreduce\?"),
    "no name": (lambda: lj.Zzz, "module 'lsgd_jax' has no attribute 'Zzz'$"),
}


@pytest.mark.parametrize("name", TRIED)
def test_a_word_is_answered_with_the_one_that_is_meant(name):
    use, message = TRIED[name]
    with pytest.raises((TypeError, AttributeError), match=message):
        use()


def test_all_words_that_are_meant_exist():
    factories = (lj.diloco, lj.slowmo, lj.Workers)
    known = {name for each in factories for name in inspect.signature(each).parameters}
    assert {meant.argument for meant in words.ARGUMENTS.values()} <= known
    assert set(words.NAMES.values()) <= set(vars(lj))
    # A word that is an argument already is never reached.
    assert not known & set(words.ARGUMENTS)
    assert all(words._plain(name) == name for name in words.NAMES)


def test_the_tree_of_a_shared_is_in_its_value():
    shared = lj.Shared({"W": 1})
    assert shared[0] == {"W": 1} and shared[-1] is None and shared[:1] == ({"W": 1},)
    with pytest.raises(
        TypeError, match=r"holds its tree in `value`: .* shared.value\['W'\]"
    ):
        _ = shared["W"]
    with pytest.raises(AttributeError, match="in `value`, write shared.value.items"):
        _ = shared.items
    with pytest.raises(AttributeError, match="a `Shared` has no attribute 'zzz'$"):
        _ = shared.zzz
