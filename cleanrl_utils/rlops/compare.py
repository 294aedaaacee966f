"""The comparison that rlops makes: it reads the runs and writes tables, plot and page."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils.rlops import report
from cleanrl_utils.rlops.page import write_page
from cleanrl_utils.rlops.plots import plot
from cleanrl_utils.rlops.runs import collect, leave_out_repeats


@dataclass
class Args:
    exp_name: str | None = None  # runs of this name; with --tags, those of each tag are a side
    tags: tuple[str, ...] = ()  # the sides: runs that have this tag (WANDB_TAGS sets them)
    filters: tuple[str, ...] = ()  # the sides as name?tag=...&cl=CAPTION; other keys are flags
    env_ids: tuple[str, ...] = ()  # environments to look at (all if not given)
    runs: tuple[Path, ...] = (Path("runs"),)  # folders of runs
    wandb_project_name: str | None = None  # read this project of Weights & Biases instead
    wandb_entity: str | None = None  # its team
    scan_history: bool = False  # every episode from Weights & Biases, not a sample of 500
    metric: str = "charts/episodic_return"  # what is compared
    metric_last_n_average_window: int = 100  # episodes at the end of a run that it counts with
    count_short: bool = False  # let runs count that did not get to their last step
    output_filename: Path = Path("compare.png")  # the plot; tables and page are written beside it
    report: bool = False  # also write a web page


def main(args):
    if args.metric_last_n_average_window < 1:
        raise SystemExit("--metric-last-n-average-window must be at least 1")
    output = (
        args.output_filename
        if args.output_filename.suffix
        else args.output_filename.with_suffix(".png")
    )
    if (
        output.suffix not in (".png", ".pdf", ".svg")
        or output.is_dir()
        or not os.access(output.absolute().parent, os.W_OK)
    ):
        raise SystemExit(
            f"cannot write {output}: "
            "it must be a .png, .pdf or .svg in a folder that can be written to"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            "rlops draws with matplotlib: install the extra docs, as in pip install 'cleanrl[docs]'"
        )

    sides, problems = collect(args)
    for runs in sides.values():
        for run in runs:
            if run.is_short and args.count_short:
                run.notes.append(f"counts, though it {run.state}")
                run.state = ""
            if 0 < len(run.rows) < args.metric_last_n_average_window:
                run.notes.append(f"has only {len(run.rows)} episodes")
        leave_out_repeats(runs)
    told = report.compare(sides, args.metric_last_n_average_window)
    notes, differences = report.list_notes(sides, problems), report.list_differences(sides)

    written = [
        output,
        *map(output.with_suffix, (".md", ".csv")),
        output.with_name(f"{output.stem}-runs.csv"),
    ]
    written += [output.with_suffix(".html")] if args.report else []
    try:
        plot(told, written[0])
        report.write_markdown(written[1], told, notes, differences)
        report.write_csv(written[2], told)
        report.write_runs(written[3], sides, told["window"])
        if args.report:
            write_page(written[4], told, sides, notes, differences)
    except OSError as error:
        raise SystemExit(f"cannot write {error.filename or output}: {error.strerror}") from None

    header, lines = report.table(told)
    said = report.align(header[:-1], [line[:-1] for line in lines])  # the words follow
    said += ["", report.scale_words(told)]
    said += report.align(*report.overall_table(told)) if told["overall"] else []
    print("\n".join([*said, "", *report.sentences(told)]))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"\nwritten: {', '.join(map(str, written))}")
