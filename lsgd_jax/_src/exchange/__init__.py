"""The kernel of all methods: a rule agrees on a target, and a pull moves workers to it.

Chains, `outer` and aggregations of gradients stand here, with their states and counts.
"""
