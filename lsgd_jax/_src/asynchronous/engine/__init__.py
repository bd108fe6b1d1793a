"""A worker that takes steps at its own speed, its messages, and the coordinator of all.

It knows neither a method nor the transport: Ray and the simulator bring theirs.
"""
