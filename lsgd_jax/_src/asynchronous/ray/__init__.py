"""Asynchronous workers as actors of Ray, in one cluster or joining from outside.

Only this folder imports Ray, which is in the extra `async`.
"""
