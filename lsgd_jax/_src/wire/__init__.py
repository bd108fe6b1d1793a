"""Messages between workers: formats, packing, and the sums and gathers of a group.

It knows nothing of periods, pulls or methods.
"""
