"""Noticing that no worker is finite any more, at the step that was asked for."""

from train.metrics.buffer import MetricsBuffer


class Divergence:
    """Whether no worker has had a finite loss for so many steps in a row.

    Losses are read when their steps are over, so that the loop waits for nothing, and all
    processes read them at the same steps. Only the step at which training may have to stop
    is waited for.

    Args:
      limit: for how many steps.
      buffer: has the losses.
    """

    def __init__(self, limit: int, buffer: MetricsBuffer):
        self._limit, self._buffer = limit, buffer
        if buffer.recent.nonfinite_steps >= limit:  # the user resumes it all the same
            buffer.recent.nonfinite_steps = 0
        # A first loss that is not finite is read before the limit is reached from it.
        self._every = max(1, limit // 2)
        self._lag = limit - self._every
        self._may_stop_at = self._limit_reached_at()

    def stops_at(self, step: int) -> bool:
        """Whether to stop after this step; to be asked at every step."""
        if step % self._every == 0:
            self._buffer.read_losses(step - self._lag)
            self._may_stop_at = self._limit_reached_at()
        if step != self._may_stop_at:
            return False
        self._buffer.read_losses(step)
        self._may_stop_at = self._limit_reached_at()
        return self._may_stop_at == step

    def _limit_reached_at(self) -> int | None:
        """At which step the limit is reached, as far as losses have been read."""
        bad = self._buffer.recent.nonfinite_steps
        return self._buffer.read - bad + self._limit if bad else None
