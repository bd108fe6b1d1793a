"""Words that process 0 says to the others through jax's coordination service.

A process that starts later hears them, too, and no word waits for a process that is lost.
"""

import itertools

from jax._src import distributed  # the service has no public name


class Words:
    """The words of process 0. All processes ask for them in the same order.

    Args:
      process_id: the number of this process.
      patience: seconds to wait for a word.
    """

    def __init__(self, process_id: int, patience: float):
        self._process_id = process_id
        self._patience = patience
        self._numbers = itertools.count()

    def of_main(self, text: str) -> str:
        """Returns the text of process 0; those of the others are not looked at.

        Raises:
          JaxRuntimeError: process 0 has said nothing, or is lost.
        """
        client = distributed.global_state.client
        assert client is not None
        key = f"lsgd_jax/words/{next(self._numbers)}"
        if self._process_id == 0:
            client.key_value_set(key, text, True)
            return text
        return client.blocking_key_value_get(key, round(1000 * self._patience))
