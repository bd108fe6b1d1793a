"""jax's coordination service for threads that stand for processes."""

import contextlib
import threading
import time

from jax.errors import JaxRuntimeError


class Killed(BaseException):
    """The process is lost."""


class World:
    """Processes that live, their store, and the messages that they send one another."""

    def __init__(self, processes):
        self.processes = processes
        self.store = {}
        self.live = {}
        self.incarnations = iter(range(100, 10_000))
        self.breaks = "never"  # the end of the names of messages that fail
        self.sent = {}  # by connection and process: the names and states of messages
        self.lock = threading.RLock()

    def start(self, process):
        with self.lock:
            self.live[process] = next(self.incarnations)
            return Process(self, process, self.live[process])


class Process:
    """A process: a client of the store, and the devices beside of a turn."""

    def __init__(self, world, number, incarnation):
        self.world = world
        self.number = number
        self.incarnation = incarnation
        self.is_silent = False  # it goes on, although the others call it lost

    @property
    def lives(self):
        return self.is_silent or self.world.live.get(self.number) == self.incarnation

    def check(self):
        if not self.lives:
            raise Killed

    # The client

    def get_live_nodes(self, processes):
        if not self.lives:
            raise JaxRuntimeError("UNAVAILABLE")
        return {p: x for p, x in self.world.live.items() if p in processes}

    def key_value_set(self, key, text, allow_overwrite):
        self.check()
        self.world.store[key] = text

    def key_value_delete(self, key):
        self.check()
        self.world.store.pop(key, None)

    def key_value_try_get(self, key):
        self.check()
        with contextlib.suppress(KeyError):
            return self.world.store[key]
        raise JaxRuntimeError("NOT_FOUND")

    def blocking_key_value_get(self, key, timeout_ms):
        while key not in self.world.store:
            self.check()
            time.sleep(0.001)
        return self.world.store[key]

    def key_value_dir_get(self, folder):
        self.check()
        with self.world.lock:
            pairs = list(self.world.store.items())
        return [pair for pair in pairs if pair[0].startswith(folder + "/")]
