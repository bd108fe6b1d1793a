"""The example whose lost hosts do not end the others: one is killed, and comes back."""

import re
import signal
import sys

import pytest
from trainers import ROOT, Trainers, free_port


PROGRAM = ROOT / "examples" / "lost_host.py"
STEPS = 4000
KILLED_AT = 150  # a line is printed there

# Code that a process runs first, to take at most 100 steps per second.
BEFORE = (
    "import time; import lsgd_jax as lj; put = lj.Workers.put_owned; "
    "lj.Workers.put_owned = lambda *a: (time.sleep(0.01), put(*a))[1]; "
)


class Hosts(Trainers):
    """Processes of the example, by their numbers.

    Each prints into a file that is numbered from 0.
    """

    def __init__(self, folder, cache, address, numbers):
        program = [sys.executable, str(PROGRAM), "--emulate", "--steps", str(STEPS)]
        no_proxies = {"http_proxy": "", "HTTPS_PROXY": ""}
        each = [([str(number)], no_proxies) for number in numbers]
        run = [program] * len(numbers)
        super().__init__(folder, [address, "3"], each, cache, BEFORE, run)

    def has_printed(self, process, text):
        return re.search(text, self.printed(process)) is not None


@pytest.mark.slow  # test_crew.py has the messages of threads in place of processes
def test_a_killed_process_does_not_end_the_others_and_comes_back(tmp_path, cache):
    address = f"127.0.0.1:{free_port()}"
    with Hosts(tmp_path / "first", cache, address, [0, 1]) as others:
        with Hosts(tmp_path / "lost", cache, address, [2]) as lost:
            lost.until(lambda: lost.has_printed(0, f"step {KILLED_AT}: mean loss"))
            lost.send(signal.SIGKILL, 0)
            lost.end()
        others.until(lambda: others.has_printed(1, "step .*: 2 workers live"))
        with Hosts(tmp_path / "again", cache, address, [2]) as again:
            assert again.end() == [0], again.printed(0)
            assert others.end() == [0, 0], others.printed(0)
            assert again.has_printed(0, "came in at step")
            assert others.has_printed(0, "step .*: 3 workers live")
            norms = [r.printed(p) for r, p in ((others, 0), (others, 1), (again, 0))]
    found = [re.findall(r"norm of the center: (.*)", printed) for printed in norms]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
