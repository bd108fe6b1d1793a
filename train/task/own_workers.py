"""The workers of one process, where other processes may be lost."""

from typing import Any

import lsgd_jax as lj


class OwnWorkers:
    """Puts the data of a process's workers on its devices; see `Task`.

    Args:
      all_workers: the grid of all workers.
      workers: those of this process, as a grid of their own.

    Attributes:
      num_workers: W, the number of all workers.
      owned: the numbers of the workers of this process.
      testers: the workers that test, all of this process.

    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> OwnWorkers(workers, workers.own()).owned
    range(0, 2)
    """

    def __init__(self, all_workers: lj.Workers, workers: lj.Workers):
        self.num_workers = all_workers.num_workers
        self.owned = all_workers.owned
        self.testers = workers

    def share(self, tree: Any) -> lj.Shared:
        """Puts one tree on every worker of the process."""
        return self.testers.share(tree)

    def put_owned(self, rows: Any) -> Any:
        """Puts the rows of the workers of the process on their devices."""
        return self.testers.put_owned(rows)
