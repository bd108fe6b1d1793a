"""Prediction of the next token of a text."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from train.config.schema import Config
from train.data import held_out
from train.data.text import Text, Vocabulary, Windows
from train.task import models
from train.task.forward import Forward, TestResult
from train.task.inside import split_batch


VOCABULARY = "vocabulary.json"
SAMPLE_TOKENS = 500
TEMPERATURE = 0.8  # divides the logits; below 1, likely tokens become more likely


class TextForward(Forward):
    """Predicts the next tokens in windows of a text.

    Args:
      config: the configuration.
      text: the text.
      place: see `train.task.experiment.Task`.
    """

    def __init__(self, config: Config, text: Text, place: Any):
        data = config.data
        self.held_out = None
        if config.method.num_held_out:
            count = config.method.num_held_out
            text, self.held_out = held_out.windows(text, data.context, count)
        self.vocabulary = text.vocabulary
        size = len(self.vocabulary)
        self.source = Windows(text, data.context, config.batch_size, place, data.shard)
        self.model = models.make(config, size)
        self.sizes = {
            f"train_{data.tokens}": len(text.train),
            f"test_{data.tokens}": len(text.test),
            "vocabulary": size,
        }
        self.guess = math.log(size)
        self.kept = {VOCABULARY: self.vocabulary.to_json(text_sha256=text.sha256)}

    def init(self, key: Array) -> dict[str, Any]:
        return dict(self.model.init(key, jnp.zeros((1, self.model.context), jnp.int32)))

    def loss(
        self, params: Any, stats: Any, data: Any, batch: Any, key: Array
    ) -> tuple[Array, Any]:
        windows = split_batch(self.source.draw(data, key))
        return self._losses({"params": params}, windows).mean(), stats

    def _losses(self, variables: Any, windows: Array) -> Array:
        """The cross entropy of each prediction in nats: [B, T + 1] -> [B, T]."""
        logits: Any = self.model.apply(variables, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])

    def sums(self, variables: Any, *batch: Array) -> tuple[Array, ...]:
        windows, valid = split_batch(batch)
        windows = windows.astype(jnp.int32)
        losses = self._losses(variables, windows)
        nbytes = jnp.asarray(self.vocabulary.nbytes)[windows[:, 1:]]

        def total(x):
            return jnp.where(valid, x, 0).sum()

        return total(losses), valid.sum(), total(nbytes)

    def mean_loss(self, sums: Any) -> Any:
        loss, tokens, _ = sums
        return loss / tokens

    def result(self, totals: Any) -> TestResult:
        """loss: mean cross entropy per token in nats; bits_per_byte: in bits per byte."""
        loss, _, nbytes = totals
        return {
            "loss": float(self.mean_loss(totals)),
            "bits_per_byte": float(loss / math.log(2) / nbytes),
        }

    def sample(self, variables: Any, key: Array) -> str:
        return written(self.model, variables, self.vocabulary, "", SAMPLE_TOKENS, key)


def written(
    model: nn.Module,
    variables: Any,
    vocabulary: Vocabulary,
    prompt: str,
    count: int,
    key: Array,
    temperature: float = TEMPERATURE,
) -> str:
    """Returns a text that a model generates.

    Args:
      model: a causal network with a `context`.
      variables: its variables.
      vocabulary: its tokens.
      prompt: the text that it continues. With '' it begins after a line feed.
      count: number of tokens to draw.
      key: random key.
      temperature: divides the logits.

    Raises:
      ValueError: the vocabulary lacks a character of the prompt.
    """
    start = vocabulary.encode(prompt) if prompt else vocabulary.start

    @jax.jit
    def ids(variables: Any, key: Array) -> Array:
        apply = functools.partial(model.apply, variables)
        return continued(apply, start, count, model.context, key, temperature)  # type: ignore

    return vocabulary.decode(np.asarray(ids(variables, key))[len(start) :])


def continued(
    apply: Callable[[Array], Any],
    start: np.ndarray,
    count: int,
    context: int,
    key: Array,
    temperature: float = TEMPERATURE,
) -> Array:
    """Continues tokens with samples from a model: int32 [len(start) + count].

    Each token is drawn from the logits after at most `context` previous tokens.

    Args:
      apply: a causal model, tokens [1, T] -> logits [1, T, V].
      start: the first tokens, at least one.
      count: number of tokens to draw.
      context: T.
      key: random key.
      temperature: divides the logits.

    >>> after = lambda tokens: 1e4 * jax.nn.one_hot((tokens + 1) % 3, 3)
    >>> continued(after, np.array([1]), 4, 2, jax.random.key(0)).tolist()
    [1, 2, 0, 1, 2]
    """
    given = len(start)
    length = len(start) + count
    tokens = jnp.zeros(max(length, context), jnp.int32).at[:given].set(start)

    def draw(i, tokens):
        first = jnp.maximum(i - context, 0)
        window = jax.lax.dynamic_slice(tokens, (first,), (context,))
        logits = apply(window[None])[0, i - 1 - first] / temperature
        return tokens.at[i].set(jax.random.categorical(jax.random.fold_in(key, i), logits))

    return jax.lax.fori_loop(given, length, draw, tokens)[:length]
