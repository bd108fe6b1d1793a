"""The experiments of the paper: python -m paper NAME.

Teng, Gao, Chalus, Choromanska, Goldfarb, Weller. Leader Stochastic Gradient Descent for
Distributed Training of Deep Learning Models. NeurIPS 2019, arXiv:1905.10395.
"""
