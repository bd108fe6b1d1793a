"""LSGD worker by worker in NumPy, as the paper's Algorithm 1 reads."""

import numpy as np


def lsgd(
    x, updates, losses, nodes, locals, pulls, periods, window, order="adapt_then_combine"
):
    """The parameters [T, W, P] after every step.

    x: start [W, P]; updates: what the base optimizer adds [T, W, P]; losses [T, W].
    A worker whose step is not finite stays where it is until a leader has restored it.
    """
    x = np.array(x, np.float64)
    workers = nodes * locals
    sick = np.zeros(workers, bool)
    ids = np.arange(workers).reshape(nodes, locals)
    history = []
    for t in range(1, len(updates) + 1):
        u = np.array(updates[t - 1], np.float64)
        u[sick] = np.nan
        recent = losses[max(0, t - window) : t]
        with np.errstate(invalid="ignore"):
            score = recent.mean(axis=0)
        for groups, pull, period in zip((list(ids), [ids.ravel()]), pulls, periods):
            if pull == 0 or t % period:
                continue
            y = x + u
            place = y if order == "adapt_then_combine" else x
            healthy = np.isfinite(score) & np.isfinite(y).all(axis=1)
            new = u.copy()
            for group in groups:
                if not healthy[group].any():
                    continue
                leader = min((i for i in group if healthy[i]), key=lambda i: (score[i], i))
                for i in group:
                    if healthy[i]:
                        new[i] = u[i] - pull * (place[i] - place[leader])
                    else:
                        new[i] = place[leader] - x[i]
            u = new
        sick = ~np.isfinite(x + u).all(axis=1)
        u[sick] = 0
        x = x + u
        history.append(x)
    return np.stack(history)
