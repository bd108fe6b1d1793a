"""Text from a model, a token at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


TEMPERATURE = 0.8  # logits are divided by it: below 1 what is likely is drawn more often


def continued(
    apply: Callable[[Array], Any], start: np.ndarray, count: int, context: int, key: Array
) -> Array:
    """Some tokens and those that a model draws to go on: int32 [len(start) + count].

    Every token is drawn from what the model says of at most `context` tokens before it.

    Args:
      apply: the model: tokens [1, T] -> logits [1, T, V], each from the tokens up to it.
      start: the first tokens, at least one.
      count: how many to draw.
      context: T.
      key: of the draws.

    >>> after = lambda tokens: 1e4 * jax.nn.one_hot((tokens + 1) % 3, 3)
    >>> continued(after, np.array([1]), 4, 2, jax.random.key(0)).tolist()
    [1, 2, 0, 1, 2]
    """
    given, length = len(start), len(start) + count
    tokens = jnp.zeros(max(length, context), jnp.int32).at[:given].set(start)

    def draw(i, tokens):
        first = jnp.maximum(i - context, 0)
        window = jax.lax.dynamic_slice(tokens, (first,), (context,))
        logits = apply(window[None])[0, i - 1 - first] / TEMPERATURE
        return tokens.at[i].set(jax.random.categorical(jax.random.fold_in(key, i), logits))

    return jax.lax.fori_loop(given, length, draw, tokens)[:length]
