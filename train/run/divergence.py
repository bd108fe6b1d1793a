"""Stops a run after a given number of steps without a finite loss."""

from train.metrics.buffer import MetricsBuffer


class Divergence:
    """Says when no worker has had a finite loss for `limit` consecutive steps.

    Losses are read after their steps are complete, so that the loop waits for nothing, and
    all processes read them at the same steps. The loop waits only for a step at which
    training may have to stop.

    Args:
      limit: number of steps.
      buffer: holds the losses.
    """

    def __init__(self, limit: int, buffer: MetricsBuffer):
        self._limit = limit
        self._buffer = buffer
        # The first nonfinite loss is read before the limit can be reached.
        self._every = max(1, limit // 2)
        self._lag = limit - self._every
        self._may_stop_at = self._limit_reached_at()

    def stops_at(self, step: int) -> bool:
        """Whether to stop after this step. Must be called at every step."""
        if step % self._every == 0:
            self._buffer.read_losses(step - self._lag)
            self._may_stop_at = self._limit_reached_at()
        if step != self._may_stop_at:
            return False
        self._buffer.read_losses(step)
        self._may_stop_at = self._limit_reached_at()
        return self._may_stop_at == step

    def _limit_reached_at(self) -> int | None:
        """The step at which the limit is reached, from the losses read so far, or None."""
        bad = self._buffer.recent.nonfinite_steps
        return self._buffer.read - bad + self._limit if bad else None
