"""What becomes of a call to a worker that is slow, hangs or is lost."""


class Unreachable(TimeoutError):
    """A peer or the coordinator that did not answer, with the limit that it had."""


class Behind(RuntimeError):
    """The others went on without this worker: it must take over where they are."""
