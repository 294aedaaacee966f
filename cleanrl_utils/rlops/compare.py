"""The comparison that rlops makes: it reads the runs and writes tables, plot and page."""

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import tyro

from cleanrl_utils.errors import need, plain
from cleanrl_utils.rlops import report, sides
from cleanrl_utils.rlops.analysis import compare
from cleanrl_utils.tables import terminal_width

HIGHER = "return reward rew score success accuracy win elo sps".split()
LOWER = "loss error regret cost".split()


@dataclass
class Args:
    exp_name: str | None = None  # runs of this name; with --tags, those of each tag are a side
    tags: tuple[str, ...] = ()  # the sides: runs that have this tag (WANDB_TAGS sets them)
    filters: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """the sides as name?tag=...&cl=CAPTION, where other keys are flags; results:NAME is the
    published data of results/NAME; ?we=...&wpn=... before them takes those that follow from W&B"""
    env_ids: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """environments to look at (all if not given); where several --filters call them by different
    names, once for each, in the same order"""
    runs: tuple[Path, ...] = (Path("runs"),)  # folders of runs
    wandb_project_name: str | None = None  # read this project of Weights & Biases instead
    wandb_entity: str | None = None  # its team
    scan_history: bool = False  # every episode from Weights & Biases, not a sample of 500
    ignore_settings: tuple[str, ...] = ()  # flags in which the runs of one side may differ
    metric: str = "charts/episodic_return"  # what is compared
    direction: str | None = None  # higher or lower is better, if the metric's name does not say
    metric_last_n_average_window: int = 100  # episodes at the end of a run whose mean is compared
    smoothing_window: int = 100  # episodes in the running means of the curves
    count_short: bool = False  # count runs that did not reach their last step
    output_filename: Path = Path("compare.png")  # the plot; the other files are written next to it
    table: bool = True  # the table of final values below the plot
    report: bool = False  # also write a web page


def find_output(path):
    """The plot's path, in a folder that is there."""
    path = path if path.suffix else path.with_suffix(".png")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise SystemExit(f"cannot write {path}: it must be a .png, .pdf or .svg")
    return path


def find_direction(args, metrics):
    """Whether less is better, from --direction or the names of the metrics."""
    if args.direction not in (None, "higher", "lower"):
        raise SystemExit(f"--direction must be higher or lower, not {args.direction}")
    if args.direction:
        return args.direction == "lower"
    found = set()
    for metric in metrics:
        parts = metric.lower().replace("/", "_").split("_")
        known = [word for word in parts if word in HIGHER + LOWER]
        if not known:
            better = "pass --direction higher or lower"
            raise SystemExit(f"{plain(metric)}: {better}")
        found.add(known[-1] in LOWER)
    if len(found) > 1:
        raise SystemExit("metrics for which higher is better cannot be compared with others")
    return found.pop()


def in_words(metric):
    """charts/episodic_return is called return, losses/value_loss value loss."""
    name = metric.rpartition("/")[2].replace("_", " ")
    return plain(name.removeprefix("episodic ") or metric)


def check_metrics(asked, chosen):
    """Some run must have each metric; else say what there is."""
    for side in asked:
        runs = chosen[side.label]
        if any(len(run.rows) for run in runs):
            continue
        there = sorted({name for run in runs for name in run.metrics if "/" in name})
        if there and side.metric not in there:
            close = get_close_matches(side.metric, there, 3) or there
            hint = ", ".join(map(plain, close))
            raise SystemExit(f"no run of {side.label} has {plain(side.metric)}: found {hint}")
    if not any(len(run.rows) for runs in chosen.values() for run in runs):
        raise SystemExit(f"no run has any {plain(asked[0].metric)} yet")


def prepare(chosen, args):
    """{label: runs} where each side has one setting and each seed counts once, and notes."""
    prepared, notes = {}, []
    for label, runs in chosen.items():
        for run in runs:
            if run.is_short and args.count_short:
                run.notes.append(f"counts, though it {run.state}")
                run.state = ""
        parts, told = sides.split(label, runs, args.ignore_settings)
        notes += told
        for part, of_part in parts.items():
            sides.leave_out_repeats(of_part)
            notes += sides.note_versions(part, of_part)
            if part in prepared:
                raise SystemExit(f"two sides are called {part}: tell them apart with cl=")
            prepared[part] = of_part
    return prepared, notes


def write(args, output, comparison, notes, differences):
    """All files of the comparison; returns their paths."""
    from cleanrl_utils.rlops.page import write_page
    from cleanrl_utils.rlops.plots import plot

    def beside(ending):
        return output.with_name(output.stem + ending)

    files = [output, *map(beside, (".md", ".tex", ".csv", "-runs.csv", "-curves.csv"))]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        plot(comparison, output, args.table)
        report.write_markdown(files[1], comparison, notes, differences)
        report.write_latex(files[2], comparison)
        report.write_csv(files[3], comparison)
        report.write_runs(files[4], comparison)
        report.write_curves(files[5], comparison)
        if args.report:
            files.append(beside(".html"))
            write_page(files[-1], comparison, notes, differences)
    except OSError as error:
        raise SystemExit(f"cannot write {error.filename or output}: {error.strerror}") from None
    return files


def main(args):
    for name in ("metric_last_n_average_window", "smoothing_window"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1")
    output = find_output(args.output_filename)
    need("matplotlib", "jinja2", "scipy")
    asked, chosen, problems = sides.collect(args)
    check_metrics(asked, chosen)
    metrics = list(dict.fromkeys(side.metric for side in asked))
    lower_is_better = find_direction(args, metrics)
    prepared, notes = prepare(chosen, args)
    comparison = compare(
        prepared,
        in_words(metrics[0]),
        args.metric_last_n_average_window,
        args.smoothing_window,
        lower_is_better,
    )
    missing = [name for group in args.env_ids[:1] for name in group if name not in comparison.until]
    notes += [f"no side has a run on {plain(name)}" for name in missing]
    if len(metrics) > 1:
        notes += [f"{side.label}: the metric is {plain(side.metric)}" for side in asked]
    notes += comparison.notes + report.list_notes(prepared, metrics, problems)
    differences = report.list_differences(prepared)
    files = write(args, output, comparison, notes, differences)
    print(report.as_text(comparison, terminal_width()))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"\nwritten: {', '.join(map(str, files))}")
