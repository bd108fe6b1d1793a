"""Asynchronous runs on a virtual clock: speeds and networks are numbers.

The workers and methods are those of a real run; transport and time are replaced.
"""
