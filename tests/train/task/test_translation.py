"""Label smoothing, and the search for the most likely translation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.data.translation import END, PAD, UNKNOWN
from train.task.transformer import EncoderDecoder
from train.task.translation import bleu, smoothed, translator


V, T = 5, 3
SOURCES = np.array([[3, 4, END], [4, END, PAD]])


@pytest.fixture(scope="module")
def network():
    """A network whose predictions differ much from token to token."""
    model = EncoderDecoder(V, T, layers=1, heads=2, width=8)
    variables = jax.jit(model.init)(jax.random.key(3), SOURCES, SOURCES)
    return model, jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, variables)


@pytest.fixture(scope="module")
def likely(network):
    """log p of each token of targets, without a cache: (source [S], [N, T]) -> [N, T]."""
    model, variables = network

    @jax.jit
    def likely(source, targets):
        sources = jnp.broadcast_to(source, (len(targets), len(source)))
        logits = model.apply(variables, sources, targets)
        logp = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logp, targets[..., None], axis=2)[..., 0]

    return lambda *given: np.asarray(likely(*map(jnp.asarray, given)))


def sentences():
    """All targets of at most T tokens. PAD follows END, and stands nowhere else."""
    for tokens in itertools.product((UNKNOWN, END, 3, 4), repeat=T):
        length = tokens.index(END) + 1 if END in tokens else T
        if all(token == END for token in tokens[length:]):  # each once
            yield [*tokens[:length], *(T - length) * [PAD]]


def test_beam_search_finds_the_best_of_all_sentences(network, likely):
    model, variables = network
    found = translator(model, beam=4**T)(variables, SOURCES)
    every = np.array(list(sentences()))
    assert len(every) == 1 + 3 + 3**2 + 3**3
    for source, result in zip(SOURCES, found):
        counts = every != PAD
        scores = np.where(counts, likely(source, every), 0).sum(1) / counts.sum(1)
        best, second = np.argsort(scores)[::-1][:2]
        assert scores[best] - scores[second] > 1e-3
        assert result.tolist() == every[best].tolist()


def test_a_greedy_translation_takes_the_most_likely_token_each_time(network, likely):
    found = np.asarray(translator(network[0], beam=1)(network[1], SOURCES))
    for source, result in zip(SOURCES, found):
        expected = np.full(T, PAD)
        for at in range(T):
            tried = np.repeat(expected[None], V - 1, axis=0)
            tried[:, at] = range(1, V)  # all but PAD
            expected[at] = 1 + likely(source, tried)[:, at].argmax()
            if expected[at] == END:
                break
        assert result.tolist() == expected.tolist()


def test_smoothed_labels_by_hand():
    p = np.array([0.5, 0.3, 0.2])
    logits = jnp.log(jnp.asarray(p)) + 7.0
    # 0.9 of the target is on the label, and a third of 0.1 on each of the classes.
    expected = -(0.9 + 0.1 / 3) * np.log(0.3) - 0.1 / 3 * (np.log(0.5) + np.log(0.2))
    assert float(smoothed(logits, jnp.array(1), 0.1)) == pytest.approx(expected, rel=1e-5)
    assert float(smoothed(logits, jnp.array(1), 0.0)) == pytest.approx(-np.log(0.3))


def test_bleu_by_hand():
    reference = "the quick brown fox jumps over the lazy dog"
    assert bleu([reference], [reference]) == pytest.approx(100)
    # One word of nine differs: 8/9 words, 6/8 pairs, 4/7 triples and 3/6 quadruples match.
    found = "the quick brown fox jumps over a lazy dog"
    expected = 100 * (8 / 9 * 6 / 8 * 4 / 7 * 3 / 6) ** 0.25
    assert bleu([found], [reference]) == pytest.approx(expected)
