"""Periods as options: what each text means, in the method that is built of it."""

import optax
import pytest

import lsgd_jax as lj
from train.config import methods, periods


def test_texts_and_what_they_mean():
    assert periods.parse("12") == periods.parse(12) == 12
    assert periods.parse("1, 500: 16,1000:32") == lj.Periods({0: 1, 500: 16, 1000: 32})
    rate = optax.cosine_decay_schedule(0.1, 100)
    rule = lj.Periods.quadratic(rate, 100, alpha=0.2, smallest=2)
    assert periods.parse("quadratic(0.2, 2)", rate, 100) == rule
    # Without a run the rule begins with its shortest period.
    assert periods.parse("quadratic(0.2, 2)", rate) == 2


@pytest.mark.parametrize(
    "text", ["often", "4, 8", "4, 8: x", "quadratic(0.2)", "0", "4, 2: 0"]
)
def test_other_texts_are_refused(text):
    chosen = methods.make("local-sgd", period=text)
    with pytest.raises(
        ValueError, match="period` must be|a period must be like 8, '1, 500"
    ):
        chosen.exchanges(1.0, 100)


def test_the_period_of_every_level():
    chosen = methods.make("lsgd", local_period="1, 4: 2", global_period="2, 4: 4")
    local, everyone = chosen.exchanges(1.0, 100).pulls
    assert local.every == lj.Periods({0: 1, 4: 2})
    assert everyone.every == lj.Periods({0: 2, 4: 4})
    wagma = methods.make("wagma", sync_period="3, 6: 5").exchanges(1.0, 100)
    assert wagma.pulls[-1].every == lj.Periods({0: 3, 6: 5})
