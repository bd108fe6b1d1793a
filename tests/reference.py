"""LSGD in NumPy, worker by worker, as in the paper's Algorithm 1."""

import math

import numpy as np


def lsgd(
    x, updates, losses, nodes, locals, pulls, periods, window, order="adapt_then_combine"
):
    """Returns the parameters [T, W, P] after every step.

    x: the start [W, P]; updates: the base optimizer's updates [T, W, P]; losses: [T, W].
    A worker whose step is not finite does not move until a leader restores it.
    """
    x = np.array(x, np.float64)
    workers = nodes * locals
    is_stuck = np.zeros(workers, bool)
    ids = np.arange(workers).reshape(nodes, locals)
    history = []
    for t in range(1, len(updates) + 1):
        u = np.array(updates[t - 1], np.float64)
        u[is_stuck] = np.nan
        recent = losses[max(0, t - window) : t]
        with np.errstate(invalid="ignore"):
            score = recent.mean(axis=0)
        for groups, pull, period in zip((list(ids), [ids.ravel()]), pulls, periods):
            if pull == 0 or t % period:
                continue
            y = x + u
            place = y if order == "adapt_then_combine" else x
            finite = np.isfinite(score) & np.isfinite(y).all(axis=1)
            new = u.copy()
            for group in groups:
                if not finite[group].any():
                    continue
                leader = min((i for i in group if finite[i]), key=lambda i: (score[i], i))
                for i in group:
                    if finite[i]:
                        new[i] = u[i] - pull * (place[i] - place[leader])
                    else:
                        new[i] = place[leader] - x[i]
            u = new
        is_stuck = ~np.isfinite(x + u).all(axis=1)
        u[is_stuck] = 0
        x = x + u
        history.append(x)
    return np.stack(history)


def rounded(x, levels, block):
    """Q(x) for a flat x [n] with a scale per block: codes of -levels..levels."""
    blocks = np.pad(x, (0, -len(x) % block)).reshape(-1, block)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / levels
    codes = np.round(blocks / np.where(scales > 0, scales, 1))
    return (codes * scales).ravel()[: len(x)]


def sum_on_two_levels(owed, nodes, add_up, block):
    """The sum of W messages [W, n]: a part of each node's sum by each worker, and errors.

    add_up: [nodes, m] -> the sum of the nodes' messages, and their errors.
    """
    workers, n = owed.shape
    inside = workers // nodes
    part = math.ceil(math.ceil(n / block) / inside) * block  # elements of a part
    node = owed.reshape(nodes, inside, n).sum(axis=1)
    total, errors = np.zeros(n), np.zeros_like(owed)
    for i, start in enumerate(range(0, n, part)):
        of_part = slice(start, start + part)
        total[of_part], errors[i::inside, of_part] = add_up(node[:, of_part])
    return total, errors


def sum_of_messages(owed, Q):
    """The sum of W messages [W, n], and the workers' errors."""
    sent = np.stack([Q(x) for x in owed])
    return sent.sum(axis=0), owed - sent


def sum_of_shares(owed, Q, block):
    """The sum of W messages [W, n] by shares of whole blocks, and the workers' errors.

    Worker i sends Q(x_i). The owner of a share sends Q of the sum, and keeps its error.
    """
    sent = np.stack([Q(x) for x in owed])
    total = sent.sum(axis=0)
    arrives = Q(total)
    errors = owed - sent
    workers, n = owed.shape
    blocks = -(-n // block)
    share = -(-blocks // workers) * block  # elements of a share
    for k in range(n):
        errors[k // share, k] += total[k] - arrives[k]
    return arrives, errors
