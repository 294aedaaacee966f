"""What a study leaves: its trials as CSV, its plots, and its best flags as commands."""

import csv
import shlex
import statistics
import sys
import warnings

import numpy as np
import optuna
from optuna.trial import TrialState

from cleanrl_utils.errors import one_line
from cleanrl_utils.processes import flag_words
from cleanrl_utils.tuner import study as shared
from cleanrl_utils.tuner.scheduler import say, short
from cleanrl_utils.tuner.trials import REPORTS

MOST_CONTOURS = 4  # the flags that mattered most: with more, the panels are too small to read


def write(study, folder):
    """Write the trials as CSV, and plots once there are two scores."""
    write_csv(study, folder / "trials.csv")
    written = ["trials.csv"]
    if len(scored(study)) > 1:
        written += draw_plots(study, folder)
    say(f"trials and plots in {short(folder)}: {', '.join(written)}")


def scored(study):
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def write_csv(study, path):
    """One row for each trial: its score, what was sampled, the score of each run, why it failed."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        row = {"trial": trial.number, "state": trial.state.name, "score": trial.value}
        if trial.state == TrialState.PRUNED:
            row["score"] = None  # Optuna has its last report there
        row["reports"] = max(trial.intermediate_values, default=0)
        row["seconds"] = round(trial.duration.total_seconds(), 1) if trial.duration else None
        row |= trial.params
        for name, value in trial.user_attrs.items():
            if isinstance(value, list) and len(value) == REPORTS:
                row[name] = value[-1]
        if trial.state == TrialState.FAIL:
            row["failed"] = trial.user_attrs.get("failed", "its tuner was stopped")
        rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "failed"))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "failed"])
        writer.writeheader()
        writer.writerows(rows)


def draw_plots(study, folder):
    """Draw the study into PNGs; return their names."""
    try:
        import matplotlib.pyplot as plt
        from optuna.visualization import matplotlib as plots
    except ImportError as error:
        say(f"no plots: {one_line(error)}")
        return []
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    of_score = dict(target_name="score")
    num_flags = max(len(trial.params) for trial in scored(study))

    def history():
        plots.plot_optimization_history(study, **of_score)
        return 7, 5  # width and height in inches

    def importance():
        plots.plot_param_importances(study, evaluator=evaluator, **of_score)
        return 7, 5

    def slice():
        plots.plot_slice(study, **of_score)
        return 3 * num_flags + 2, 4

    def contour():
        importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
        panels = plots.plot_contour(study, list(importances)[:MOST_CONTOURS], **of_score)
        for panel in np.ravel(panels):
            panel.label_outer()
        return 12, 10

    def parallel_coordinate():
        plot = plots.plot_parallel_coordinate(study, **of_score)
        plot.collections[0].set_cmap("viridis")  # Optuna's is white at one end
        for axes in plt.gcf().axes:
            axes.grid(False)
        return 2 * num_flags + 3, 5

    drawn = []
    of_pairs = [contour, parallel_coordinate] if num_flags > 1 else []
    for draw in (history, importance, slice, *of_pairs):
        name = draw.__name__
        try:  # Optuna warns of few trials, which the plot shows too, and sets Matplotlib's style
            with warnings.catch_warnings(action="ignore"), plt.rc_context():
                size = draw()
                plt.gcf().set_size_inches(size)
                for axes in plt.gcf().axes:  # labels of minor ticks lie on top of each other
                    axes.xaxis.set_minor_formatter("")
                    axes.yaxis.set_minor_formatter("")
                plt.savefig(folder / f"{name}.png", dpi=100, bbox_inches="tight")
            drawn.append(f"{name}.png")
        except Exception as error:  # such as no flag that differs
            say(f"no {name} plot: {one_line(error)}")
        finally:
            plt.close("all")
    return drawn


def print_best(study, tuner):
    if not scored(study):
        raise SystemExit(f"study {tuner.study_name} has no trial with a score")
    best = study.best_trial
    print(f"best trial {best.number} of {shared.count_finished(study)}: {best.value:.4f}")
    for env_id in tuner.target_scores:
        scores = []
        for name, curve in best.user_attrs.items():
            if name.startswith(f"{env_id} seed "):
                scores.append(curve[-1])
        mean = statistics.fmean(scores)
        print(f"{env_id}: {tuner.metric} {mean:.2f} over {len(scores)} seeds")
        words = flag_words({"env-id": env_id, **best.user_attrs["flags"]})
        print(" ", shlex.join(["python", short(tuner.script), *words]))
    sys.stdout.flush()
