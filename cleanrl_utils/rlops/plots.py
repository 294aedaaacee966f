"""The plot of rlops: learning curves, aggregate scores, performance profile and the table."""

import warnings

import numpy as np

from cleanrl_utils.rlops.report import align, table

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
)  # also for the colour-blind
ACROSS = 4


def colour(i):
    return COLOURS[i % len(COLOURS)]


def literal(text):
    return text.replace("$", r"\$")  # else matplotlib takes it for a formula


def plot(told, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, overall, names = (
        told["curves"],
        told["overall_curves"],
        {"steps": "environment steps", "time": "seconds"},
    )
    panels = [(env_id, axis) for env_id in curves["steps"] for axis in names]
    panels += [("all", axis) for axis in names if overall]
    panels += ["profile", "intervals"] if told["overall"] else []
    down = -(-len(panels) // ACROSS)
    size = (4 * ACROSS, 3 * down + 0.9 + 0.15 * len(told["rows"]))
    figure, axes = plt.subplots(down, ACROSS, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for panel, axis in zip(panels, axes.flat, strict=False):
        axis.grid(alpha=0.3)
        if panel == "profile":
            draw_profile(axis, told)
        elif panel == "intervals":
            draw_intervals(axis, told)
        elif panel[0] == "all":
            grid, drawn = overall[panel[1]]
            for i, (middle, low, high) in enumerate(drawn.values()):
                axis.plot(grid, middle, color=colour(i))
                axis.fill_between(grid, low, high, color=colour(i), alpha=0.15, linewidth=0)
            axis.set(
                title=f"{len(told['shared'])} environments",
                xlabel=names[panel[1]],
                ylabel="interquartile mean score",
            )
        else:
            grid, drawn = curves[panel[1]][panel[0]]
            for i, (of_runs, mean, std) in enumerate(drawn.values()):
                for run, curve in of_runs:
                    axis.plot(
                        grid,
                        curve,
                        color=colour(i),
                        alpha=0.35,
                        linewidth=0.7,
                        linestyle=":" if run.state else "-",
                    )
                axis.plot(grid, mean, color=colour(i))
                axis.fill_between(
                    grid, mean - std, mean + std, color=colour(i), alpha=0.15, linewidth=0
                )
            axis.set(title=literal(panel[0]), xlabel=names[panel[1]], ylabel="episodic return")
        if panel[1] == "steps":
            axis.xaxis.set_major_formatter(
                lambda n, _: f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1000:g}k" if n else "0"
            )
    handles = [plt.Line2D([], [], color=colour(i)) for i in range(len(told["sides"]))]
    figure.legend(
        handles,
        [literal(label) for label in told["sides"]],
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    lines = [literal(line) for line in align(*table(told))]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", family="monospace", fontsize=9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in a name of another script
        figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_profile(axis, told):
    thresholds = np.array(told["overall"]["thresholds"])
    for i, of_side in enumerate(told["overall"]["sides"].values()):
        middle, low, high = of_side["profile"]
        axis.plot(thresholds, middle, color=colour(i))
        axis.fill_between(thresholds, low, high, color=colour(i), alpha=0.15, linewidth=0)
    axis.set(
        title="performance profile",
        xlabel="score",
        ylabel="share of runs above it",
        ylim=(-0.02, 1.02),
    )


def draw_intervals(axis, told):
    names = {
        "improvement": "probability of\nimprovement",
        "optimality_gap": "optimality gap",
        "median": "median",
        "mean": "mean",
    }
    names["iqm"] = "interquartile\nmean"
    count = len(told["sides"])
    for i, of_side in enumerate(told["overall"]["sides"].values()):
        for y, name in enumerate(names):
            if name in of_side:
                middle, low, high = of_side[name]
                at = y + 0.3 * (0.5 - (i + 0.5) / count)
                axis.plot(
                    [low, high],
                    [at, at],
                    color=colour(i),
                    linewidth=5,
                    alpha=0.35,
                    solid_capstyle="butt",
                )
                axis.plot(middle, at, "|", color=colour(i), markersize=9, markeredgewidth=2)
    axis.set(
        title="scores and their 95% intervals", yticks=range(len(names)), yticklabels=names.values()
    )
