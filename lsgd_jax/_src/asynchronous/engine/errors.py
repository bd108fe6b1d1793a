"""Errors of calls to other workers."""


class UnreachableError(TimeoutError):
    """Raised when a peer or the coordinator does not answer within the timeout."""


class StaleWorkerError(RuntimeError):
    """Raised when the others went on without this worker, which must take over from one."""
