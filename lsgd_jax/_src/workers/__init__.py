"""Workers on a mesh of devices: the functions that run on all of them, and their arrays.

Exchanges run without it, inside any function that binds the axes of its rules.
"""
