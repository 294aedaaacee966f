"""Error rates and costs of cleanrl_utils.trial on scores as our runs have them.

    python scripts/simulate_trial.py

Rebuilds docs/trial/simulation.json and simulation.svg, and the tables of docs/trial.md. The scores
of both files are drawn from final returns in results/ (resampled, with a little noise so that none
are equal) and scaled to a standard deviation of 0.1; the second file's are moved by an effect.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # so that this runs from any folder
from cleanrl_utils.trial import MIN_SEEDS, judge  # noqa: E402

PAGE = ROOT / "docs" / "trial.md"
OUTPUT = ROOT / "docs" / "trial"
DELTA = ALPHA = 0.05
SPREAD = 0.1  # standard deviation of a file's normalized scores
SEEDS = 30  # after which an undecided trial ends
TRIALS = 4000
EFFECTS = [0, 0.5, 1, 1.5, 2, 3, 5, 10]  # in standard deviations of a file's scores
COARSE = 3  # centers between -span and span: verdicts need only 0 and the two deltas


def final_returns(folder, env_id):
    """The mean of the last 100 episodes of each published run."""
    finals = []
    for path in sorted((ROOT / "results" / folder).glob(f"{env_id}__*.csv")):
        rows = list(csv.DictReader(path.open()))
        finals.append(np.mean([float(row["episodic_return"]) for row in rows[-100:]]))
    return np.array(finals)


def published():
    many = json.loads((ROOT / "results/dqn_jax/MountainCar-v0__16_seeds.json").read_text())
    return {
        "SpaceInvaders, Gaussian": final_returns("ppo_jax_minatar", "SpaceInvaders-MinAtar"),
        "Acrobot, skewed": final_returns("ppo_jax", "Acrobot-v1"),
        "MountainCar, bimodal": np.array(many["each seed"]),
        "Breakout, heavy-tailed": final_returns("ppo_jax_minatar", "Breakout-MinAtar"),
    }


def draw(name, scores, shape, rng):
    """Normalized scores of a file; the Gaussian ones from the fitted distribution."""
    if name.endswith("Gaussian"):
        return SPREAD * rng.standard_normal(shape)
    noise = 0.1 * scores.std() * rng.standard_normal(shape)
    drawn = rng.choice(scores, shape) + noise
    return SPREAD * (drawn - scores.mean()) / scores.std()


def verdicts(differences):
    """[(verdict, seeds)] of trials whose differences are (trials, seeds, environments)."""
    told = [judge(trial, DELTA, ALPHA, COARSE) for trial in differences]
    return [(one["verdict"], one["seeds"]) for one in told]


def by_seeds(told, wrong):
    """Share of the trials with a wrong verdict after each number of seeds."""
    ends = np.array([seeds if verdict in wrong else SEEDS + 1 for verdict, seeds in told])
    return [(ends <= seeds).mean() for seeds in range(1, SEEDS + 1)]


def peeking(differences):
    """The same for a paired t-test with p < 0.05 after each seed from the third on."""
    found = np.zeros(len(differences), dtype=bool)
    shares = [0.0] * (MIN_SEEDS - 1)
    for seeds in range(MIN_SEEDS, SEEDS + 1):
        found |= stats.ttest_1samp(differences[:, :seeds, 0], 0, axis=1).pvalue < ALPHA
        shares.append(found.mean())
    return shares


def simulate():
    rng, told = np.random.default_rng(1), {}
    for name, scores in published().items():
        same = draw(name, scores, (2, TRIALS, SEEDS, 1), rng)
        same = same[1] - same[0]
        both = draw(name, scores, (2, TRIALS, SEEDS, 2), rng)
        both = both[1] - both[0]
        # another distribution with the same mean, to which no test on signs is exact
        other = SPREAD * rng.standard_normal(same.shape) - draw(name, scores, same.shape, rng)
        opposite = both + SPREAD * np.array([1, -1])
        changed = ("better", "worse")
        told[name] = {
            "no change": by_seeds(verdicts(same), changed),
            "no change, 2 envs": by_seeds(verdicts(both), changed),
            "t-test after each seed": peeking(same),
            "at delta": by_seeds(verdicts(same + DELTA), ("no difference that matters",)),
            "same mean": by_seeds(verdicts(other), changed),
            "opposite effects": by_seeds(verdicts(opposite), changed),
            "effects": [costs(same, both, effect) for effect in EFFECTS],
        }
    return told


def rare_failures():
    """The new file fails in one run of ten and is 0.1 better in the others: the means are equal.

    Returns the shares that the trial and a t-test of ten seeds call better."""
    rng = np.random.default_rng(1)
    fails = rng.random((TRIALS, SEEDS, 1)) < 0.1
    differences = np.where(fails, -0.9, 0.1) + 0.02 * rng.standard_normal(fails.shape)
    ended = verdicts(differences)
    ten = stats.ttest_1samp(differences[:, :10, 0], 0, axis=1)
    better = np.mean([verdict == "better" for verdict, _ in ended])
    return better, np.mean((ten.pvalue < ALPHA) & (ten.statistic > 0))


def costs(same, both, effect):
    """Seeds until the verdict, and how many trials find the effect, against ten fixed seeds."""
    row = {"effect": effect}
    for number, differences in ((1, same[:1000]), (2, both[:1000])):
        shifted = differences + effect * SPREAD
        ended = verdicts(shifted)
        ten = stats.ttest_1samp(shifted[:, :10].mean(2), 0, axis=1)
        row[f"{number}"] = {
            "seeds": np.mean([seeds for _, seeds in ended]),
            "better": np.mean([verdict == "better" for verdict, _ in ended]),
            "undecided": np.mean([verdict == "undecided" for verdict, _ in ended]),
            "better after ten": np.mean([v == "better" and seeds <= 10 for v, seeds in ended]),
            "t-test of ten": np.mean((ten.pvalue < ALPHA) & (ten.statistic > 0)),
        }
    return row


def draw_figure(told):
    """Two plots on nothing: their gray reads on a light and on a dark page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gray = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "cleanrl", "font.size": 9}
    settings |= dict.fromkeys(gray, "#808080") | {"font.family": "sans-serif"}
    colors = ["#4c8dd6", "#e0803a", "#3aa76d", "#b06fc4"]
    with plt.rc_context(settings):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        seeds = range(1, SEEDS + 1)
        for color, (name, of_name) in zip(colors, told.items(), strict=True):
            peeked = 100 * np.array(of_name["t-test after each seed"])
            left.plot(seeds, peeked, color=color, linestyle="--", linewidth=1)
            left.plot(seeds, 100 * np.array(of_name["no change"]), color=color, label=name)
            cost = [row["1"]["seeds"] for row in of_name["effects"]]
            right.plot(EFFECTS, cost, color=color, label=name, marker=".")
        two = [[row["2"]["seeds"] for row in of_name["effects"]] for of_name in told.values()]
        right.plot(
            EFFECTS, np.mean(two, axis=0), color="#808080", marker=".", label="2 environments, mean"
        )
        left.axhline(100 * ALPHA, color="#808080", linewidth=1)
        left.text(SEEDS, 100 * ALPHA + 0.4, "5%", ha="right")
        left.set(xlabel="seeds looked at", ylabel="% of trials", ylim=(0, 33))
        left.set_title(
            "A change that does nothing is called better or worse\n"
            "(dashed: paired t-test after each seed)",
            fontsize=9,
        )
        left.legend(frameon=False, loc="upper left")
        right.axhline(10, color="#808080", linewidth=1)
        right.text(10, 10.4, "ten fixed seeds", ha="right")
        right.set(
            xlabel="effect, in standard deviations of a file's scores", ylabel="seeds", ylim=0
        )
        right.set_title(f"Seeds until the verdict, {SEEDS} at most", fontsize=9)
        right.legend(frameon=False)
        for axes in (left, right):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(OUTPUT / "simulation.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def error_table(told):
    header = [key for key in next(iter(told.values())) if key != "effects"]
    lines = ["| scores | " + " | ".join(header) + " |", "|---" * (len(header) + 1) + "|"]
    for name, of_name in told.items():
        cells = [f"{100 * of_name[key][-1]:.1f}%" for key in header]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(told):
    """Means over the four kinds of scores."""
    lines = [
        "| effect | seeds | runs | found | t-test | seeds, 2 envs | runs | found | t-test |",
        "|---" * 9 + "|",
    ]
    for number, effect in enumerate(EFFECTS):
        cells = [f"{effect}"]
        for environments in "12":
            rows = [of_name["effects"][number][environments] for of_name in told.values()]
            seeds = np.mean([row["seeds"] for row in rows])
            found = 100 * np.mean([row["better"] for row in rows])
            ten = 100 * np.mean([row["t-test of ten"] for row in rows])
            cells += [f"{seeds:.1f}", f"{10 * seeds - 100:+.0f}%", f"{found:.0f}%", f"{ten:.0f}%"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_tables(told):
    text = PAGE.read_text()
    for name, table in (("errors", error_table(told)), ("costs", cost_table(told))):
        start, end = f"<!-- {name} -->\n\n", f"\n\n<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + table + end + rest.split(end)[1]
    PAGE.write_text(text)


def rounded(told):
    if isinstance(told, dict):
        return {key: rounded(value) for key, value in told.items()}
    if isinstance(told, list):
        return [rounded(value) for value in told]
    return round(float(told), 4)


if __name__ == "__main__":
    told = rounded(simulate())
    OUTPUT.mkdir(exist_ok=True)
    draw_figure(told)
    (OUTPUT / "simulation.json").write_text(json.dumps(told) + "\n")
    write_tables(told)
    print(error_table(told), cost_table(told), sep="\n\n")
    print("rare failures, called better by the trial and by a t-test of ten:", rare_failures())
