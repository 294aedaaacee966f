"""The plot of rlops: learning curves, aggregate scores, performance profile and the table."""

import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cleanrl_utils.rlops.report import overall_names, table
from cleanrl_utils.tables import text_table

# also for the colour-blind
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #7F7F7F".split()
ACROSS = 4
X_LABELS = {"steps": "environment steps", "time": "seconds"}


def colour(i):
    return COLOURS[i % len(COLOURS)]


def literal(text):
    return text.replace("$", r"\$")  # else matplotlib takes it for a formula


def thousands(steps, _):
    if steps >= 1e6:
        return f"{steps / 1e6:g}M"
    return f"{steps / 1000:g}k" if steps else "0"


def plot(c, path, with_table=True):
    """Draw a panel for each environment over steps and over time, and those over all of them."""
    panels = []  # (function that draws it, its arguments)
    for env_id in c.curves["steps"]:
        panels += [(draw_env, (env_id, axis)) for axis in X_LABELS]
    panels += [(draw_overall, (axis,)) for axis in c.overall_curves]
    panels += [(draw_profile, ()), (draw_intervals, ())] if c.overall else []
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    lines = [literal(line) for line in text_table(*table(c))] if with_table else []
    width = max(4 * across, 0.085 * max(map(len, lines), default=0))
    size = (width, 3 * down + 0.9 + 0.15 * len(lines))
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for (draw, arguments), axis in zip(panels, axes.flat, strict=False):
        axis.grid(alpha=0.3)
        draw(axis, c, *arguments)
    handles = [plt.Line2D([], [], color=colour(i)) for i in range(len(c.sides))]
    labels = [literal(label) for label in c.sides]
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", family="monospace", fontsize=9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in a name of another script
        figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_band(axis, i, x, middle, low, high):
    axis.plot(x, middle, color=colour(i))
    axis.fill_between(x, low, high, color=colour(i), alpha=0.15, linewidth=0)


def set_x(axis, name):
    axis.set(xlabel=X_LABELS[name])
    if name == "steps":
        axis.xaxis.set_major_formatter(thousands)


def draw_env(axis, c, env_id, name):
    grid, drawn = c.curves[name][env_id]
    for i, (of_runs, mean, std) in enumerate(drawn.values()):
        for run, curve in of_runs:
            style = dict(color=colour(i), alpha=0.35, linewidth=0.7)
            axis.plot(grid, curve, linestyle=":" if run.state else "-", **style)
        draw_band(axis, i, grid, mean, mean - std, mean + std)
    axis.set(title=literal(env_id), ylabel=literal(c.metric))
    set_x(axis, name)


def draw_overall(axis, c, name):
    grid, drawn = c.overall_curves[name]
    for i, curves in enumerate(drawn.values()):
        draw_band(axis, i, grid, *curves)
    axis.set(title=f"{len(c.shared)} environments", ylabel="interquartile mean score")
    set_x(axis, name)


def draw_profile(axis, c):
    for i, of_side in enumerate(c.overall.values()):
        draw_band(axis, i, c.thresholds, *of_side["profile"])
    labels = dict(xlabel="score", ylabel="share of runs above it")
    axis.set(title="performance profile", ylim=(-0.02, 1.02), **labels)


def draw_intervals(axis, c):
    names = dict(reversed(overall_names(c).items()))
    for i, of_side in enumerate(c.overall.values()):
        for y, name in enumerate(names):
            if name in of_side:
                middle, low, high = of_side[name]
                at = y + 0.3 * (0.5 - (i + 0.5) / len(c.sides))
                bar = dict(linewidth=5, alpha=0.35, solid_capstyle="butt")
                axis.plot([low, high], [at, at], color=colour(i), **bar)
                axis.plot(middle, at, "|", color=colour(i), markersize=9, markeredgewidth=2)
    labels = [name.replace(" ", "\n", 1) if len(name) > 14 else name for name in names.values()]
    axis.set(title="scores and their 95% intervals", yticks=range(len(names)), yticklabels=labels)
