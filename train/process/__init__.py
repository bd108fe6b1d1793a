"""The process of a command: its streams, signals, exit status, caches, and messages."""
