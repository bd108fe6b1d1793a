"""SparseLoCo: DiLoCo that sends the largest entries of pseudo-gradients, in few bits."""

from typing import Unpack

import optax

from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_not_negative
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.schedule import Period
from lsgd_jax._src.methods.averaging import diloco
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.wire.top_k import Aggregate, TopK


@by_value
@takes_options(wire="it is top-k, as `density`, `chunk` and `bits` say")
def sparse_diloco(
    period: Period = 30,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    density: float = 1 / 64,
    chunk: int = 4096,
    bits: int | None = 2,
    decay: float = 0.95,
    aggregate: Aggregate = "mean",
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""SparseLoCo: DiLoCo with sparse messages of few bits and error feedback.

    If t mod τ = 0, with y = x + u the worker's parameters after its own step t = 1, 2, …:

    .. math::
      e_i &\leftarrow \beta e_i + (a - y_i), \qquad
        s_i = Q(\text{TopK}(e_i)), \qquad e_i \leftarrow e_i - s_i \\
      a &\leftarrow a - \alpha \frac{1}{|H|} \sum_{j \in H} s_j, \qquad y_i \leftarrow a

    a is the anchor (the mean of the starts at first), e the error of a worker (0 at first),
    s its message, H the workers whose y and loss are finite. TopK keeps the k entries of
    largest magnitude of every chunk of C. Q rounds them to the means of 2^bits bins, as
    `TopK` describes. The messages are gathered and added up in one order, so that the
    anchor is bit-identical on all workers. At the defaults a message is 0.027 bytes per
    parameter, 146 times less than float32.

    This is ``diloco(period, optax.sgd(learning_rate), wire=TopK(...))``: error
    feedback with a decay takes the place of the outer momentum. Any other outer optimizer
    works with the same wire.

    A worker that is not finite sends nothing, takes the anchor whole, and its e becomes 0.
    A single worker takes the anchor as well, moved by what it would have sent.

    Args:
      period: steps between exchanges of a fragment, τ, or `Periods`.
      learning_rate: learning rate of the anchor, α, or a schedule that counts exchanges
        from 0.
      density: share of the entries that a worker sends, k / C, in (0, 1]; at least one
        entry of each chunk.
      chunk: entries from which the largest are chosen, C; leaves share no chunk.
      bits: bits of a value, from 1 to 8; None: values are not rounded.
      decay: how much of the error is kept until the next exchange, β in [0, 1].
      aggregate: what an entry's sum is divided by: the number of workers ('mean', the
        equation), or of those that have sent it ('senders', the released code).
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. The anchor is kept once
      and e by every worker, in float32 at least.

    Raises:
      ValueError: a period below 1, a learning rate that is negative or not finite, numbers
        of the message as for `TopK`, fragments and a delay as for `diloco`.

    Reference: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025,
    arXiv:2508.15706. The equation is that of a write-up; top-k and Q are those of the
    released code tplr-ai/templar, whose chunks are blocks of matrices.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.adamw(1e-3), lj.contrib.sparse_diloco(period=30))
    """
    if not callable(learning_rate):
        check_not_negative("learning_rate", learning_rate)
    options["wire"] = TopK(
        density=density,
        chunk=chunk,
        bits=bits,
        decay=decay,
        aggregate=aggregate,
    )
    return diloco(period, optax.sgd(learning_rate), axes=axes, **options)
