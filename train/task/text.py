"""The prediction of the next token of a text."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import lsgd_jax as lj
from train.config import Config
from train.data.text import Text, Vocabulary, Windows
from train.task.forward import TestResult
from train.task.inside import split_batch
from train.task.sampling import continued
from train.task.transformer import Transformer


VOCABULARY = "vocabulary.json"
SAMPLE_TOKENS = 500


class TextForward(NamedTuple):
    """From windows of a text to the logits of each next token; see `Forward`.

    Attributes:
      model: the network.
      source: where windows come from.
      vocabulary: what token ids stand for.
      sizes: the numbers of tokens.
      steps_per_epoch: in so many a worker draws as many tokens as it has.
      kept: the vocabulary, and by which text it came about.
    """

    model: Transformer
    source: Windows
    vocabulary: Vocabulary
    sizes: dict[str, int]
    steps_per_epoch: int
    kept: dict[str, str]

    def init(self, key: Array) -> dict[str, Any]:
        return dict(self.model.init(key, jnp.zeros((1, self.model.context), jnp.int32)))

    def loss(
        self, params: Any, stats: Any, data: Any, batch: Any, key: Array
    ) -> tuple[Array, Any]:
        windows = split_batch(self.source.draw(data, key))
        return self._losses({"params": params}, windows).mean(), stats

    def _losses(self, variables: Any, windows: Array) -> Array:
        """The cross entropy of each prediction, in nats: [B, T + 1] -> [B, T]."""
        logits: Any = self.model.apply(variables, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])

    def sums(self, variables: Any, *batch: Array) -> tuple[Array, ...]:
        windows, valid = split_batch(batch)
        windows = windows.astype(jnp.int32)
        losses = self._losses(variables, windows)
        nbytes = jnp.asarray(self.vocabulary.nbytes)[windows[:, 1:]]
        total = lambda x: jnp.where(valid, x, 0).sum()
        return total(losses), valid.sum(), total(nbytes)

    def result(self, totals: Any) -> TestResult:
        """loss: mean cross entropy of a token in nats; bits_per_byte: that in bits."""
        loss, tokens, nbytes = totals
        return {
            "loss": float(loss / tokens),
            "bits_per_byte": float(loss / math.log(2) / nbytes),
        }

    def sample(self, variables: Any, key: Array) -> str:
        start = self.vocabulary.start

        @jax.jit
        def ids(variables, key):
            apply = lambda tokens: self.model.apply(variables, tokens)
            return continued(apply, start, SAMPLE_TOKENS, self.model.context, key)

        return self.vocabulary.decode(np.asarray(ids(variables, key))[len(start) :])


def make(config: Config, text: Text, workers: lj.Workers) -> TextForward:
    """The task of an experiment on text.

    Args:
      config: the experiment's.
      text: what it learns.
      workers: the grid.
    """
    data, vocabulary = config.data, text.vocabulary
    source = Windows(text, data.context, config.batch_size, workers, data.shard)
    options = dataclasses.asdict(config.transformer)
    model = Transformer(len(vocabulary), data.context, **options)
    sizes = {
        f"train_{data.tokens}": len(text.train),
        f"test_{data.tokens}": len(text.test),
        "vocabulary": len(vocabulary),
    }
    kept = {VOCABULARY: vocabulary.to_json(text_sha256=text.sha256)}
    steps = max(1, source.size // (config.batch_size * data.context))
    return TextForward(model, source, vocabulary, sizes, steps, kept)
