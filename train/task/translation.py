"""Translation of sentences."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from train.config.schema import Config
from train.data import held_out
from train.data.resident import Resident
from train.data.sampler import rows_in_batches, sampled
from train.data.translation import END, INSTALL, PAD, Subwords, Translation
from train.process.messages import is_installed
from train.task import models
from train.task.forward import Check, Forward, TestResult, go_on
from train.task.inside import split_batch
from train.task.text import VOCABULARY


TEST_BATCH = 64  # sentences per worker, or that are translated at once
SAMPLE_SENTENCES = 5


class TranslationForward(Forward):
    """Translates sentences.

    Args:
      config: the configuration.
      data: the sentences and their translations.
      place, warn: see `train.task.experiment.Task`.
    """

    def __init__(
        self, config: Config, data: Translation, place: Any, warn: Callable[[str], None]
    ):
        self.vocabulary = data.vocabulary
        self.held_out = None
        if config.method.num_held_out:
            data, self.held_out = held_out.examples(data, config.method.num_held_out)
        self._test_sentences = data.held_out
        self._smoothing = config.label_smoothing
        count = len(data.train.source)
        size = len(data.vocabulary)
        each = config.batch_size, config.seed, config.data.shard
        sampler, own = sampled(count, place.num_workers, *each)
        self.source = Resident(data, sampler, place, own, TEST_BATCH)
        self.model = models.make(config, size)
        self.sizes = {
            "train_pairs": count,
            "test_pairs": len(data.test.source),
            "pairs_left_out": data.left_out,
            "vocabulary": size,
        }
        self.guess = math.log(size)
        self.kept = {VOCABULARY: self.vocabulary.to_json(text_sha256=data.sha256)}
        if not is_installed("sacrebleu"):
            warn(f"without BLEU, because sacrebleu {INSTALL}")

    def init(self, key: Array) -> dict[str, Any]:
        tokens = jnp.zeros((1, self.model.context), jnp.int32)
        return dict(self.model.init(key, tokens, tokens))

    def loss(
        self, params: Any, stats: Any, data: Any, batch: Any, key: Array
    ) -> tuple[Array, Any]:
        pairs = split_batch(self.source.examples(data, batch))
        losses, counts = self._losses({"params": params}, pairs, self._smoothing)
        return losses.sum() / counts.sum(), stats

    def _losses(self, variables: Any, pairs: Any, smoothing: float) -> tuple[Array, Array]:
        """The loss of each token, 0 for PAD, and whether it counts: both [B, T]."""
        source, target = (x.astype(jnp.int32) for x in pairs)
        logits: Any = self.model.apply(variables, source, target)
        counts = target != PAD
        return jnp.where(counts, smoothed(logits, target, smoothing), 0), counts

    def sums(self, variables: Any, *batch: Array) -> tuple[Array, ...]:
        *pairs, valid = split_batch(batch)
        losses, counts = self._losses(variables, pairs, smoothing=0.0)

        def total(x):
            return jnp.where(valid[:, None], x, 0).sum()

        return total(losses), total(counts)

    def mean_loss(self, sums: Any) -> Any:
        loss, tokens = sums
        return loss / tokens

    def result(self, totals: Any) -> TestResult:
        """loss: mean cross entropy per token in nats, without label smoothing."""
        return {"loss": float(self.mean_loss(totals))}

    def score(self, variables: Any, check: Check = go_on) -> TestResult:
        """bleu: BLEU of greedy translations of the held-out sentences."""
        if not is_installed("sacrebleu"):
            return {}
        source, target = self._test_sentences
        found = translated(self.model, variables, self.vocabulary, source, check=check)
        return {"bleu": bleu(found, target)}

    def sample(self, variables: Any, key: Array) -> str:
        """Translations of the first held-out sentences."""
        some = self._test_sentences[0][:SAMPLE_SENTENCES]
        found = translated(self.model, variables, self.vocabulary, some)
        return "".join(f"{a}\n  {b}\n" for a, b in zip(some, found))


def smoothed(logits: Array, labels: Array, smoothing: float) -> Array:
    r"""The cross entropy with smoothed labels in nats: ([..., V], int [...]) -> [...].

    With smoothing ε and log-probabilities ℓ,

    .. math:: -(1 - \varepsilon) \ell_y - \frac{\varepsilon}{V} \sum_v \ell_v.

    Source: Szegedy et al., CVPR 2016, section 7.

    >>> smoothed(jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([0]), 0.0).tolist()
    [0.693]
    """
    likely = jax.nn.log_softmax(logits)
    of_label = jnp.take_along_axis(likely, labels[..., None], axis=-1)[..., 0]
    return -(1 - smoothing) * of_label - smoothing * likely.mean(axis=-1)


def bleu(found: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU in %, by sacrebleu with its default tokens, one reference each."""
    import sacrebleu

    return sacrebleu.corpus_bleu(list(found), [list(references)]).score


def translated(
    model: nn.Module,
    variables: Any,
    vocabulary: Subwords,
    texts: Sequence[str],
    beam: int = 1,
    check: Check = go_on,
) -> list[str]:
    """Translates sentences. Those that exceed the context of the model are cut.

    Args:
      model: an `EncoderDecoder`.
      variables: its variables.
      vocabulary: its subwords.
      texts: the sentences.
      beam: number of candidates that a beam search keeps. With 1 it is greedy.
      check: called before each batch. The translation is left if it raises an exception.
    """
    if not texts:
        return []
    search = translator(model, beam)
    ids = vocabulary.encode(texts, model.context)  # type: ignore
    # A batch ends with its longest sentence, so sentences of like lengths go together.
    order = np.argsort((ids != PAD).sum(axis=1), kind="stable")
    rows = np.minimum(rows_in_batches(len(texts), 1, TEST_BATCH)[:, 0], len(texts) - 1)
    each = []
    for batch in rows:
        check()
        each.append(np.asarray(search(variables, ids[order[batch]])))
    found = np.empty_like(ids)
    found[order] = np.concatenate(each)[: len(texts)]
    return vocabulary.decode(found)


@functools.lru_cache(maxsize=8)
def translator(model: Any, beam: int) -> Callable[[Any, Any], Array]:
    """The jitted translation of a batch: (variables, source [B, S]) -> target [B, T]."""

    @jax.jit
    def translate(variables: Any, source: Array) -> Array:
        encoded: Any = model.apply(variables, source, method="encode")
        encoded = jax.tree.map(lambda x: jnp.repeat(x, beam, axis=0), encoded)

        def step(cache: Any, last: Array, at: Array) -> tuple[Array, Any]:
            given: Any = variables | cache, last[:, None], encoded, at
            logits, cache = model.apply(*given, method="decode", mutable="cache")
            return logits[:, 0], cache

        start = jnp.full(len(source) * beam, END)
        _, cache = step({}, start, jnp.zeros([], jnp.int32))  # makes the cache
        return searched(step, cache, len(source), beam, model.context)

    return translate


def searched(
    step: Callable[[Any, Array, Array], tuple[Array, Any]],
    state: Any,
    count: int,
    beam: int,
    length: int,
) -> Array:
    """Beam search for the most likely sentences, int32 [B, T].

    The search keeps the K candidates with the largest sums of log-probabilities, ended ones
    among them. Of the last K it returns the one with the largest mean over its tokens,
    which include END. PAD follows END.

    Args:
      step: (state, last tokens [B K], position) -> (logits [B K, V], state).
      state: the first state, arrays with a leading axis B K.
      count: B, the number of sentences.
      beam: K.
      length: T.
    """
    rows = jnp.arange(count)[:, None]

    def reordered(x: Array, parents: Array) -> Array:
        if beam == 1:
            return x
        return x.reshape(count, beam, *x.shape[1:])[rows, parents].reshape(x.shape)

    def advance(carry: tuple) -> tuple:
        at, state, tokens, scores = carry
        last = jnp.where(at > 0, tokens[..., at - 1], END)
        ended = (at > 0) & ((last == END) | (last == PAD))
        logits, state = step(state, last.reshape(-1), at)
        likely = jax.nn.log_softmax(logits).reshape(count, beam, -1)
        is_pad = (jnp.arange(likely.shape[-1]) == PAD)[None, None]
        # An ended sentence continues with PAD, which costs nothing.
        likely = jnp.where(is_pad, -jnp.inf, likely)
        likely = jnp.where(ended[..., None], jnp.where(is_pad, 0.0, -jnp.inf), likely)
        sums = (scores[..., None] + likely).reshape(count, -1)
        scores, best = jax.lax.top_k(sums, beam)
        parents, token = jnp.divmod(best, likely.shape[-1])
        state = jax.tree.map(lambda x: reordered(x, parents), state)
        tokens = tokens[rows, parents].at[..., at].set(token)
        return at + 1, state, tokens, scores

    def goes_on(carry: tuple) -> Array:
        at, _, tokens, _ = carry
        ended = (tokens == END).any(axis=-1)
        return (at < length) & ~ended.all()

    tokens = jnp.zeros((count, beam, length), jnp.int32)
    scores = jnp.where(jnp.arange(beam) > 0, -jnp.inf, jnp.zeros((count, beam)))
    start = jnp.zeros([], jnp.int32), state, tokens, scores
    *_, tokens, scores = jax.lax.while_loop(goes_on, advance, start)
    best = jnp.argmax(scores / (tokens != PAD).sum(axis=-1), axis=1)
    return tokens[jnp.arange(count), best]
