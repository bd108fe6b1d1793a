"""A process's number in a run."""

import sys

import pytest

from train.cluster import claim


@pytest.mark.skipif(sys.platform != "linux", reason="by what only Linux has")
def test_only_one_process_of_a_host_has_a_number(tmp_path):
    held = claim.take("127.0.0.1:9", 1)
    for coordinator in ("127.0.0.1:9", "localhost:9"):
        words = f"another process of this host is number 1 at {coordinator} already: is -"
        with pytest.raises(OSError, match=words):
            claim.take(coordinator, 1)
    for other in (claim.take("127.0.0.1:9", 2), claim.take("localhost:10", 1)):
        for each in other:
            each.close()
    for each in held:
        each.close()
    for each in claim.take("localhost:9", 1):
        each.close()
