"""Draws the pictures of the site: `python docs/pictures/draw.py [NAME...]` writes the SVGs.

The curves are no sketches: each is a parameter of four workers that this library trains,
on a parabola with the minimum at 1, each with a bias and noise of its own. `gain` draws
seconds of the tables in docs/results/slow_networks.md.
"""

import pathlib
import re
import sys

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import lsgd_jax as lj


HERE = pathlib.Path(__file__).parent
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
INK, PALE = "#333333", "#BBBBBB"
STEPS, RATE = 48, 0.12
plt.rcParams |= {
    "font.size": 9,
    "svg.hashsalt": "lsgd_jax",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
}


# Curves of training


def gradients(seed=3):
    """Biases and noise [STEPS, 4]: workers see different data."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=[STEPS, 4])
    return (np.array([-1.5, -0.4, 0.5, 1.4]) + noise).astype(np.float32)


def trained(tx, noise):
    """The parameter of each worker after every step [STEPS + 1, 4], and the last state."""
    workers = lj.Workers(nodes=2, locals=2)

    def train_step(x, state, noise):
        grads = {"x": x["x"] - 1 + noise}
        updates, state = tx.update(grads, state, x, value=jnp.square(x["x"] - 1))
        return lj.apply_updates(x, updates), state

    params = workers.replicate({"x": np.float32(-1)})
    state = workers.map(tx.init)(params)
    step, path, states = workers.map(train_step), [params["x"]], [state]
    for row in noise:
        params, state = step(params, state, workers.put(row))
        path.append(params["x"])
        states.append(state)
    return np.array(path), states


def draw_curves(axes, path, title, period=None):
    for worker, color in enumerate(COLORS):
        axes.plot(path[:, worker], color=color, lw=1.4, label=f"worker {worker}")
    if period:
        for t in range(period, STEPS + 1, period):
            axes.axvline(t, color=PALE, lw=0.8, ls=":", zorder=0)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step")
    axes.set_xlim(0, STEPS)


# Messages between workers


def empty(axes, title, size=1.35):
    axes.set(xlim=(-size, size), ylim=(-size, size), aspect="equal")
    axes.axis("off")
    axes.set_title(title, fontsize=9)


def around(count, radius=1.0, start=90):
    angles = np.radians(start - 360 * np.arange(count) / count)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def dot(axes, xy, text="", color=INK, size=13, marker="o"):
    axes.plot(*xy, marker, ms=size, color=color, zorder=3)
    axes.text(*xy, text, color="white", ha="center", va="center", fontsize=7.5, zorder=4)


def arrow(axes, start, end, color=INK, style="-|>", gap=9, bend=0.0, **line):
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": style,
            "color": color,
            "shrinkA": gap,
            "shrinkB": gap,
            "connectionstyle": f"arc3,rad={bend}",
            **line,
        },
    )


LOSSES = 0.9, 1.2, 1.0, 0.6, 1.1, 0.8, 1.3, 1.0  # of eight workers; 3 and 5 lead their node
GROUPS = {3: range(4), 5: range(4, 8)}  # leader of a node: its workers


def draw_nodes(axes, title, groups, color):
    """Two nodes of four workers with their losses, and who is pulled to which leader."""
    spots = []
    for node in range(2):
        x = 2.6 * node
        box = plt.Rectangle((x - 0.4, -0.4), 2.1, 1.95, fill=False, ec=PALE, lw=1.2)
        axes.add_patch(box)
        axes.text(x + 0.65, 1.65, f"node {node}", ha="center", color=INK, fontsize=11)
        spots += [np.array([x + 1.3 * (i % 2), 1.15 - 1.1 * (i // 2)]) for i in range(4)]
    for leader, workers in groups.items():
        for worker in set(workers) - {leader}:
            bend = -0.28 if (worker, leader) == (7, 3) else 0.0  # around worker 6
            line = {"bend": bend, "gap": 14, "lw": 1.7}
            arrow(axes, spots[worker], spots[leader], color, **line)
    for worker, (spot, loss) in enumerate(zip(spots, LOSSES)):
        leads = worker in groups
        marker, size = ("*", 40) if leads else ("o", 24)
        axes.plot(*spot, marker, ms=size, color=color if leads else COLORS[0], zorder=3)
        style = {"ha": "center", "va": "center", "zorder": 4, "fontsize": 9.5}
        axes.text(*spot, f"{loss:.1f}", color="white", **style)
    axes.set_title(title, fontsize=12, color=color)
    axes.set(xlim=(-0.6, 4.5), ylim=(-0.75, 1.95), aspect="equal")
    axes.axis("off")


def draw_near(axes):
    """The pulls inside the nodes."""
    draw_nodes(axes, "every 4 steps: to the best of the node", GROUPS, COLORS[2])
    axes.text(1.95, -0.68, "number: loss of a worker", ha="center", fontsize=11)


def draw_far(axes):
    """The pulls of all workers."""
    draw_nodes(axes, "every 16 steps: to the best of all", {3: range(8)}, "#C05000")
    axes.text(1.95, -0.68, "star: the lowest loss", ha="center", fontsize=11)


def draw_star(middle, title, style="<|-|>"):
    def draw(axes):
        empty(axes, title)
        for worker, spot in enumerate(around(4, start=45)):
            dot(axes, spot, str(worker), COLORS[worker])
            arrow(axes, spot, (0, 0), style=style, gap=12)
        dot(axes, (0, 0), middle, INK, size=19, marker="s")

    return draw


def draw_graph(topology, title, style="-|>", rounds=None):
    """Every round of a graph in a color of its own."""

    def draw(axes):
        empty(axes, title)
        spots = around(topology.num_workers)
        for r, permutations in enumerate(topology.rounds[:rounds]):
            for permutation in permutations:
                for i, j in permutation:
                    if style == "-|>" or i < j:
                        arrow(axes, spots[i], spots[j], COLORS[r % 4], style, gap=8, lw=1.1)
        for worker, spot in enumerate(spots):
            dot(axes, spot, str(worker))

    return draw


def draw_groups(axes):
    """The groups of two of eight workers in three rounds: a butterfly."""
    axes.set(xlim=(-0.6, 3.4), ylim=(-7.7, 1.1))
    axes.axis("off")
    axes.set_title("groups of S = 2, by step", fontsize=9)
    for r in range(3):
        for i in range(8):
            axes.plot([r, r + 1], [-i, -i], color=PALE, lw=0.8, zorder=0)
            if i < i ^ 2**r:
                ends = (r + 0.5, -i), (r + 0.5 + 0.1 * (i % 2**r), -(i ^ 2**r))
                x = r + 0.35 + 0.1 * (i % 2**r)
                axes.plot([x, x], [-i, -(i ^ 2**r)], color=COLORS[r], lw=1.6)
                for _, y in ends:
                    axes.plot(x, y, "o", ms=4, color=COLORS[r])
        axes.text(r + 0.5, 0.6, f"t = {r + 1}", ha="center")
    for i in range(8):
        axes.text(-0.25, -i, str(i), ha="center", va="center", color=INK)


def draw_parle(axes):
    empty(axes, "inner loops around anchors,\nanchors to their mean")
    for worker, spot in enumerate(around(4, 0.95, start=45)):
        dot(axes, spot, "$x_a$", COLORS[worker])
        arrow(axes, spot, (0, 0), COLORS[worker], gap=12)
        turns = np.linspace(0, 5.2, 80)
        loop = spot + 0.33 * np.stack([np.cos(turns), np.sin(turns)], axis=1)
        axes.plot(*loop.T, color=COLORS[worker], lw=1)
        arrow(axes, loop[-2], loop[-1], COLORS[worker], gap=0)
    dot(axes, (0, 0), r"$\bar x$", INK, size=17, marker="s")


# The pages of methods


def save(figure, name):
    figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def of_family(name, draw, *runs):
    """A schema, and beside it the parameters; runs: (title, method, period[, rate])."""
    rows = 2 if len(runs) == 3 else 1
    wide = [1.0] + [1.35] * (len(runs) // rows)
    size = (2.5 * sum(wide), 0.3 + 2.3 * rows)
    figure, axes = plt.subplots(rows, len(wide), figsize=size, width_ratios=wide)
    axes = axes.flat
    draw(axes[0])
    for panel, (title, method, period, *rate) in zip(axes[1:], runs):
        base = optax.sgd(*rate or [RATE])
        path, states = trained(optax.chain(base, method), gradients())
        draw_curves(panel, path, title, period)
        draw_what_is_followed(panel, path, states)
    axes[1].set_ylabel("parameter")
    low, high = zip(*(panel.get_ylim() for panel in axes[1:]))
    for panel in axes[1:]:
        panel.set_ylim(min(low), max(high))
    figure.tight_layout(rect=(0, 0.06 / rows, 1, 1))
    figure.legend(
        *axes[-1].get_legend_handles_labels(),
        fontsize=7.5,
        frameon=False,
        ncols=6,
        loc="lower center",
    )
    save(figure, name)


def draw_what_is_followed(axes, path, states):
    """The center, the anchor or the leader of all, whichever a method has."""
    for t in range(1, STEPS + 1):
        pulls = lj.diagnostics(states[t])
        if pulls[-1].leader is not None and pulls[-1].is_due(t):
            best = int(pulls[-1].leader[0])
            label = None if t > pulls[-1].period else "leader of all at its pull"
            axes.plot(t, path[t, best], "*", ms=10, color=INK, label=label, ls="")
    for name in ("center", "anchor"):
        kept = [optax.tree.get(state, name) for state in states]
        if isinstance(kept[0], lj.Shared):
            values = [float(shared.value["x"]) for shared in kept]
            style = {"color": INK, "alpha": 0.55, "lw": 2, "drawstyle": "steps-post"}
            axes.plot(values, **style, label=name)
            return


def draw_robust():
    """Gradients of eight workers, two of which send ten times the opposite."""
    workers = lj.Workers(nodes=1, locals=8)
    rules = {
        "mean (all-reduce)": lj.allreduce(),
        "coordinate-wise median": lj.robust.coordinate_median(),
        "LICM, γ = 0.5": lj.robust.licm(gamma=0.5),
        "CGE, f = 2": lj.robust.cge(faulty=2),
    }
    noise = 0.3 * np.random.default_rng(0).normal(size=[STEPS, 8]).astype(np.float32)
    figure, (schema, panel) = plt.subplots(1, 2, figsize=(6, 2.6), width_ratios=[1, 1.5])
    empty(schema, "two of eight workers send anything")
    for worker, spot in enumerate(around(8)):
        bad = worker in (2, 5)
        arrow(schema, spot, (0, 0), COLORS[1] if bad else INK, gap=14)
        dot(schema, spot, "?" if bad else "g", COLORS[1] if bad else COLORS[0])
    dot(schema, (0, 0), "rule", INK, size=21, marker="s")
    for (title, rule), color in zip(rules.items(), (COLORS[1], *COLORS[:1], *COLORS[2:])):
        tx = optax.chain(rule, optax.sgd(RATE))

        def step(x, state, noise, bad, tx=tx):
            g = (x - 1 + noise) * jnp.where(bad, -10.0, 1.0)
            updates, state = tx.update(g, state, x)
            return optax.apply_updates(x, updates), state

        x, bad = workers.replicate(np.float32(-1)), workers.put(np.isin(range(8), (2, 5)))
        state, step, path = workers.map(tx.init)(x), workers.map(step), [x]
        for row in noise:
            x, state = step(x, state, workers.put(row), bad)
            path.append(x)
        panel.plot(np.array(path)[:, 0], color=color, label=title)
    panel.axhline(1, color=PALE, lw=0.8, ls=":")
    panel.set(ylim=(-4, 2), xlabel="step", ylabel="parameter", xlim=(0, STEPS))
    panel.legend(fontsize=6.5, frameon=False, loc="lower right")
    figure.tight_layout()
    save(figure, "robust")


def draw_low_traffic():
    """Bytes per parameter and step, as counted, and the parameters under NoLoCo."""
    noloco = lj.contrib.noloco(12)
    methods = {
        "all-reduce": lj.allreduce(),
        "DES-LOC, τ = 32": lj.contrib.desloc(optax.adam(RATE), 32),
        "NoLoCo, τ = 50": lj.contrib.noloco(50),
        "DiLoCo, τ = 30": lj.diloco(30),
        "SPARTA, 0.5 %": lj.contrib.sparta(0.005),
        "SparseLoCo, τ = 30": lj.contrib.sparse_diloco(30),
    }
    workers, size = lj.Workers(nodes=1, locals=2), 2**16
    x = workers.replicate(np.ones(size, np.float32))

    def sent(tx):
        state = workers.map(lambda x: tx.update(x, tx.init(x), x)[1])(x)
        return sum(each.payload / each.period for each in lj.diagnostics(state)) / size

    figure, (bars, panel) = plt.subplots(1, 2, figsize=(6.6, 2.6), width_ratios=[1.2, 1])
    bars.barh(list(methods), list(map(sent, methods.values())), color=COLORS[0])
    bars.set(xscale="log", xlabel="bytes per parameter and step")
    bars.invert_yaxis()
    path, _ = trained(optax.chain(optax.sgd(RATE), noloco), gradients())
    draw_curves(panel, path, "noloco, τ = 12", 12)
    panel.set_ylabel("parameter")
    figure.tight_layout()
    save(figure, "low_traffic")


def draw_families():
    ring, hops = lj.topology.ring(8), lj.topology.exponential(8)
    of_family(
        "easgd",
        draw_star("c", "workers and center pull at each other"),
        ("easgd, τ = 8", lj.easgd(0.8, period=8), 8),
        ("downpour, τ = 8, a quarter of the rate", lj.downpour(period=8), 8, RATE / 4),
    )
    slow = lj.slowmo(period=12, beta=0.5, learning_rate=RATE)
    of_family(
        "averaging",
        draw_star("mean", "all take the mean"),
        ("local_sgd, τ = 12", lj.local_sgd(12), 12),
        ("slowmo, τ = 12", slow, 12),
        ("diloco, τ = 12", lj.diloco(12), 12),
    )
    of_family(
        "gossip",
        draw_graph(ring, "a ring of 8", "<|-|>"),
        ("dpsgd on a ring", lj.dpsgd(), None),
        ("adpsgd, pairs", lj.adpsgd(), None),
    )
    of_family(
        "push_sum",
        draw_graph(hops, "exponential graph of 8:\nhops of 1, 2, 4 by step"),
        ("sgp", lj.sgp(), None),
        ("osgp, staleness 1", lj.osgp(), None),
    )
    of_family(
        "pairwise",
        draw_graph(hops, "each takes from one peer,\nanother at each step", rounds=1),
        ("pairwise, f = 1/2, p = 0.2", lj.pairwise(fetch_probability=0.2), None),
        ("gosgd, p = 0.2", lj.contrib.gosgd(send_probability=0.2), None),
    )
    of_family("group", draw_groups, ("wagma, S = 2, τ = 12", lj.wagma(2, 12), 12))
    parle = lj.parle(RATE, period=12, anchor_pull=2.0, outer_learning_rate=0.6)
    of_family("parle", draw_parle, ("parle, L = 12", parle, 12))
    draw_low_traffic()
    draw_robust()


def draw_lsgd():
    """Which worker is pulled to which, and below it the parameters of four workers."""
    # Two pictures stand side by side, or below each other on a phone.
    for name, draw in (("leader_of_node", draw_near), ("leader_of_all", draw_far)):
        figure, axes = plt.subplots(figsize=(4.2, 2.7))
        draw(axes)
        figure.subplots_adjust(0, 0, 1, 0.9)
        save(figure, name)

    figure = plt.figure(figsize=(8.4, 5.2))
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 0.8], hspace=0.25, wspace=0.02)
    draw_near(figure.add_subplot(grid[0, 0]))
    draw_far(figure.add_subplot(grid[0, 1]))
    curves = figure.add_subplot(grid[1, :])
    method = lj.lsgd(0.3, 0.3, local_period=4, global_period=16)
    path, states = trained(optax.chain(optax.sgd(RATE), method), gradients())
    draw_curves(curves, path, "", 4)
    draw_what_is_followed(curves, path, states)
    curves.set_ylabel("parameter")
    curves.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1))
    save(figure, "lsgd")


# The page of concepts


def draw_workers():
    figure, axes = plt.subplots(figsize=(6.2, 2.3))
    axes.set(xlim=(-0.5, 9.2), ylim=(-0.75, 2.6))
    axes.axis("off")
    for node in range(2):
        left = 4.7 * node
        axes.add_patch(plt.Rectangle((left - 0.3, 0.0), 4.4, 2.1, fill=False, ec=PALE))
        axes.text(left + 1.9, 2.25, f"node {node}", ha="center")
        for local in range(4):
            x = left + 1.05 * local
            axes.add_patch(plt.Rectangle((x, 0.2), 0.75, 1.7, fc="#F3F3F3", ec=PALE))
            dot(axes, (x + 0.37, 1.45), str(4 * node + local), COLORS[0])
            axes.text(x + 0.37, 0.9, "x, s", ha="center", fontsize=8)
            axes.text(x + 0.37, 0.4, "device", ha="center", fontsize=6.5, color="#777777")
    axes.text(4.3, -0.45, "leaves of all workers: [8, ...]", ha="center", color=INK)
    save(figure, "workers")


def draw_pull():
    figure, axes = plt.subplots(figsize=(4.6, 2.3))
    x, y, z = np.array([0, 0]), np.array([1.7, 0.25]), np.array([3.1, 1.5])
    landed = y + 0.4 * (z - y)
    arrow(axes, x, y, COLORS[0], gap=7, lw=1.6)
    arrow(axes, y, landed, COLORS[1], gap=7, lw=1.6)
    axes.plot(*np.stack([landed, z]).T, color=COLORS[1], ls=":", lw=1.2)
    for xy, name, color, marker in (
        (x, "$x$", COLORS[0], "o"),
        (y, "$y = x + u$", COLORS[0], "o"),
        (landed, r"$y + \lambda (z - y)$", COLORS[1], "o"),
        (z, "target $z$", COLORS[2], "*"),
    ):
        axes.plot(*xy, marker, ms=13 if marker == "*" else 7, color=color)
        axes.annotate(name, xy, (8, -11), textcoords="offset points", fontsize=10)
    axes.text(0.55, 0.22, "own step $u$", color=COLORS[0], ha="center")
    axes.text(1.75, 0.75, "pull", color=COLORS[1], ha="center")
    axes.set(xlim=(-0.2, 4.4), ylim=(-0.4, 1.8))
    axes.axis("off")
    save(figure, "pull")


def draw_schedule():
    figure, axes = plt.subplots(figsize=(6.2, 1.5))
    axes.plot([0.5, 33], [0, 0], color=PALE)
    for t in range(1, 33):
        local, everywhere = t % 4 == 0, t % 16 == 0
        axes.plot(t, 0, "o", ms=3, color=PALE)
        if local:
            axes.plot(t, 0, "o", ms=7, color=COLORS[2])
        if everywhere:
            axes.plot(t, 0.5, "*", ms=13, color=COLORS[1])
    axes.text(0.5, 0.45, "global_period=16", color=COLORS[1])
    axes.text(0.5, -0.6, "local_period=4", color=COLORS[2])
    axes.text(33, -0.6, "in between nothing is sent", color="#777777", ha="right")
    axes.set(ylim=(-0.8, 0.9))
    axes.axis("off")
    save(figure, "schedule")


def draw_centers():
    """Where the mean of the workers and the center of EASGD stand while training."""
    figure, axes = plt.subplots(figsize=(5.2, 2.5))
    tx = optax.chain(optax.sgd(RATE), lj.easgd(0.8, period=8))
    path, states = trained(tx, gradients())
    for worker, color in enumerate(COLORS):
        axes.plot(path[:, worker], color=color, lw=1, alpha=0.5)
    mean = path.mean(axis=1)
    axes.plot(mean, color=INK, lw=2, label="lj.consensus: the mean of the workers")
    centers = [float(optax.tree.get(state, "center").value["x"]) for state in states]
    style = {"color": INK, "lw": 2, "ls": "--", "drawstyle": "steps-post"}
    axes.plot(centers, **style, label="lj.center: EASGD's own center")
    axes.set(xlim=(0, STEPS), xlabel="step", ylabel="parameter")
    axes.legend(fontsize=7, frameon=False)
    save(figure, "centers")


def draw_shared():
    figure, axes = plt.subplots(figsize=(5.4, 2.2))
    for left, rows, color, name in (
        (0, 4, COLORS[0], "a leaf of parameters: [W, 6]"),
        (4.2, 1, COLORS[2], "in a Shared: [6]"),
    ):
        for row in range(rows):
            for column in range(6):
                spot = (left + 0.5 * column, 1.5 - 0.5 * row)
                axes.add_patch(
                    plt.Rectangle(spot, 0.5, 0.5, fc=color, alpha=0.25, ec=color)
                )
            label = f"worker {row}" if rows > 1 else "all"
            axes.text(
                left - 0.1, 1.75 - 0.5 * row, label, ha="right", va="center", fontsize=7
            )
        axes.text(left + 1.5, 2.2, name, ha="center")
    axes.set(xlim=(-1, 7.5), ylim=(-0.2, 2.5), aspect="equal")
    axes.axis("off")
    save(figure, "shared")


LINES = {  # the rows of the table, and how the picture calls them
    "allreduce": "all-reduce, every step",
    "lsgd, 16": "LSGD, every 16 steps",
    "diloco, 16": "DiLoCo, every 16 steps",
    "streaming-int8, 16": "DiLoCo in fragments as int8",
}


@plt.rc_context({"font.size": 11.5})
def draw_gain():
    """Seconds to an error at three rates, on logarithmic scales.

    A dot is the steps of a race times a timed step, a cross a run that was timed to the
    end. A band is the range of the dots where a slower network measured faster by chance,
    so that it never falls.
    """
    page = (HERE.parent / "results" / "slow_networks.md").read_text()
    computed, timed = page.split("### Timed to the end")
    rates = 1000, 100, 10  # Mbit/s, the order of the columns
    figure, axes = plt.subplots(figsize=(7.4, 3.1))
    for (row, label), color in zip(LINES.items(), COLORS):
        seconds = np.array(cells(computed, row)[1:])
        low = np.minimum.accumulate(seconds[::-1])[::-1]
        high = np.maximum.accumulate(seconds)
        axes.fill_between(rates, low, high, color=color, alpha=0.4, lw=3)
        axes.plot(rates, seconds, "o", color=color, markersize=5)
        _, end, _ = cells(timed, row)
        axes.plot(rates[-1], end, "x", color=color, markersize=8, mew=2)
        axes.text(8.4, end, f"{label}: {end:.0f} s", color=color, va="center")
    axes.set(xscale="log", yscale="log", xlim=(1250, 9), ylim=(20, 900))
    axes.set_xticks(rates, ["1 Gbit/s", "100 Mbit/s", "10 Mbit/s"])
    axes.set_yticks([30, 100, 300, 700], ["30 s", "100 s", "300 s", "700 s"])
    axes.minorticks_off()
    title = "time to a test error of 55 % on CIFAR-10, four workers"
    note = "crosses: timed to the end; dots: computed, steps of a race × a timed step"
    axes.set_title(title, loc="left", pad=24)
    axes.text(0, 1.05, note, transform=axes.transAxes, fontsize=9, color="gray")
    figure.subplots_adjust(right=0.62, top=0.82)
    save(figure, "gain")


def cells(page, row):
    """The numbers in the first row of a table that begins so."""
    found = re.search(rf"^\| {row} \|(.*)\|$", page, re.M)
    return [float(cell) for cell in found[1].split("|")]


DRAW = {
    "families": draw_families,
    "lsgd": draw_lsgd,
    "workers": draw_workers,
    "pull": draw_pull,
    "schedule": draw_schedule,
    "centers": draw_centers,
    "shared": draw_shared,
    "gain": draw_gain,
}


def main():
    for name in sys.argv[1:] or DRAW:
        DRAW[name]()


if __name__ == "__main__":
    lj.emulate_devices(8)
    main()
