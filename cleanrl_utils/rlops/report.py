"""A comparison as text, Markdown, LaTeX and CSV; and summary(), the table of one benchmark."""

import csv
import math
import re
from pathlib import Path

from cleanrl_utils import bands
from cleanrl_utils.errors import plain
from cleanrl_utils.rlops import sides as run_sides
from cleanrl_utils.rlops.analysis import final_row
from cleanrl_utils.runs import episodes_of
from cleanrl_utils.tables import UNLIMITED, terminal_width, text_table

OVERALL = {
    "iqm": "interquartile mean",
    "mean": "mean",
    "median": "median",
    "optimality_gap": "optimality gap",
}
RETURN = "charts/episodic_return"
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def numbers(*values):
    """With as many digits as the largest of them needs."""
    largest = max((abs(value) for value in values if value and math.isfinite(value)), default=1)
    digits = min(max(2 - math.floor(math.log10(largest)), 2), 6)
    return [f"{value:,.{digits}f}" for value in values]


def mean_and_std(row):
    if not row["seeds"]:
        return "none"
    return " ± ".join(numbers(*(row[key] for key in ("mean", "std") if row[key] is not None)))


def span(value, interval):
    if value is None:
        return "none"
    middle, *ends = numbers(value, *(interval if interval is not None else ()))
    return middle + (f" [{', '.join(ends)}]" if ends else "")


def table(c):
    """Header and rows of the table of final values, as text; the last two compare sides."""
    header = ["environment", "side", "seeds", f"final {c.metric}", "difference [95%]", "in words"]
    num_columns = 6 if len(c.sides) > 1 else 4
    lines = []
    for row in c.rows:
        line = [row["environment"], row["side"], str(row["seeds"]), mean_and_std(row), "", ""]
        if "verdict" in row:
            line[4:] = span(row["difference"], row["interval"]), row["verdict"]
        lines.append(line[:num_columns])
    return header[:num_columns], lines


def overall_table(c):
    """Header and rows of the scores over all environments, as text: a column for each side."""
    lines = []
    for name, words in overall_names(c).items():
        cells = [of_side.get(name) for of_side in c.overall.values()]
        # runs that are all alike, or single ones, have no interval to resample
        cells = [cell and span(cell[0], cell[1:] if cell[1] < cell[2] else None) for cell in cells]
        lines.append([words, *(cell or "" for cell in cells)])
    return ["score [95%]", *c.overall], lines


def overall_names(c):
    """The scores and what they are called; to improve takes a side to improve on."""
    return OVERALL | ({"improvement": "probability of improvement"} if len(c.overall) > 1 else {})


def sentences(c):
    """The verdicts, one a line."""
    compared = {}
    for row in c.rows:
        if "verdict" in row:
            compared[f"{row['environment']}: {row['side']} - {c.baseline}"] = row
    if len(c.shared) > 1:
        for label, of_side in c.overall.items():
            if "verdict" in of_side:
                name = f"mean score of {len(c.shared)} environments: {label} - {c.baseline}"
                compared[name] = of_side
    said = []
    for name, row in compared.items():
        said.append(f"{name} = {span(row['difference'], row['interval'])}: {row['verdict']}")
    tested = sum(row["interval"] is not None for row in compared.values())
    if tested > 10:
        chance = f"about {tested / 20:.0f} would be outside the noise by chance alone"
        said.append(f"of {tested} differences, {chance}")
    return said


def scale_words(c):
    if not c.shared:
        return "No environment has runs of every side that count."
    human = [env_id for env_id in c.shared if c.is_on_human_scale(env_id)]
    others = [env_id for env_id in c.shared if env_id not in human]
    left_out = [env_id for env_id in c.until if env_id not in c.shared]
    zero, one = ("most", "least") if c.lower_is_better else ("least", "most")
    words = {
        "Scores are 0 for random play and 1 for a human, as published": human,
        f"Scores are 0 for the {zero} and 1 for the {one} that any run here had": others,
        "Not in the scores, since a side has no run that counts": left_out,
    }
    return " ".join(f"{said}: {', '.join(env_ids)}." for said, env_ids in words.items() if env_ids)


def how_it_counts(c):
    """Said once on the page, in Markdown and in LaTeX."""
    differences = f"; differences are to {c.baseline}, with their 95% intervals (Welch)"
    return (
        f"The value of a seed is the mean of its last {c.window} {c.unit}; "
        f"mean ± sample standard deviation over seeds{differences if len(c.sides) > 1 else ''}."
    )


def as_text(c, width=UNLIMITED):
    header, lines = table(c)
    said = text_table(header[:5], [line[:5] for line in lines], width)  # the words follow
    said += ["", scale_words(c)]
    said += text_table(*overall_table(c), width) if c.overall else []
    return "\n".join([*said, "", *sentences(c)])


def summary(folders, metric=RETURN, window=100):
    """The final returns of these run folders, per environment and experiment, as a text table.

    Runs of one experiment with different settings have rows of their own. Below the table stands
    what does not count, and why.
    """
    side = run_sides.Side("all", "all", metric)
    found, notes = run_sides.find_local([Path(folder) for folder in folders])
    runs = run_sides.list_local(side, found, notes)
    run_sides.read_folders(runs, metric)
    parts = {}
    for exp_name in dict.fromkeys(run.exp_name for run in runs):
        of_name = [run for run in runs if run.exp_name == exp_name]
        parts |= run_sides.split(exp_name, of_name)[0]
    for of_part in parts.values():
        run_sides.leave_out_repeats(of_part)
    lines = []
    for env_id in dict.fromkeys(run.env_id for run in runs):
        for label, of_part in parts.items():
            here = [run for run in of_part if run.env_id == env_id]
            row = final_row([run.final(window) for run in here if not run.state])
            if here:
                lines.append([env_id, label, str(row["seeds"]), mean_and_std(row)])
    name = f"{plain(metric)}, mean ± std"
    rows = text_table(["environment", "experiment", "seeds", name], lines, terminal_width())
    return "\n".join([*rows, *list_notes(parts, [metric], notes)])


def list_notes(sides, metrics, problems):
    """Every run that does not count and everything else that is not as it should be."""
    notes = []
    for label, runs in sides.items():
        notes += [f"{label}: {run.name} {run.state}: left out" for run in runs if run.state]
    for label, runs in sides.items():
        notes += [f"{label}: {run.name}: {note}" for run in runs for note in run.notes]
    sources = [run.source for runs in sides.values() for run in runs]
    folders = [source for source in sources if isinstance(source, Path) and source.is_dir()]
    if metrics == [RETURN]:  # what the published runs are known by
        notes += bands.sum_up(folders)
    return notes + problems


def list_differences(sides):
    """(name, what each side has) of the settings and versions in which the sides differ."""
    rows = []
    for kind in ("settings", "versions"):
        per_side = [[getattr(run, kind) for run in runs] for runs in sides.values()]
        for name in dict.fromkeys(name for runs in per_side for run in runs for name in run):
            values = [
                ", ".join(sorted({run.get(name, "none") for run in runs})) for runs in per_side
            ]
            if len(set(values)) > 1:
                rows.append([name, *values])
    return rows


def escape_markdown(text):
    return re.sub(r"([\\`*<>|]|^\[|\](?=[(\[]))", r"\\\1", text)


def markdown_table(header, lines):
    lines = [[escape_markdown(cell) for cell in line] for line in (header, *lines)]
    rows = [lines[0], ["---"] * len(header), *lines[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def markdown_list(lines):
    return "\n".join(f"- {escape_markdown(line)}" for line in lines)


def write_markdown(path, c, notes, differences):
    parts = [markdown_table(*table(c)), escape_markdown(how_it_counts(c))]
    if c.overall:
        parts += [markdown_table(*overall_table(c)), "95% intervals from a stratified bootstrap."]
    parts += [escape_markdown(scale_words(c)), markdown_list(sentences(c))]
    if differences:
        parts.append(markdown_table(["setting or version", *c.sides], differences))
    parts.append(markdown_list(notes))
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def escape_latex(text):
    return "".join(LATEX.get(character, character) for character in text)


def write_latex(path, c):
    """Environments by sides, for the package booktabs."""
    cells = {(row["environment"], row["side"]): mean_and_std(row) for row in c.rows}
    lines = [["environment", *c.sides]]
    for env_id in c.until:
        lines.append([env_id, *(cells[env_id, label] for label in c.sides)])
    rows = [" & ".join(map(escape_latex, line)) + r" \\" for line in lines]
    rows = [row.replace("±", r"$\pm$") for row in rows]
    body = [rf"\begin{{tabular}}{{l{'r' * len(c.sides)}}}", r"\toprule", rows[0], r"\midrule"]
    body += [*rows[1:], r"\bottomrule", r"\end{tabular}"]
    comment = f"% final {c.metric}: {how_it_counts(c)}"
    path.write_text("\n".join([comment, *body]) + "\n", encoding="utf-8")


def write_rows(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header.split())
        writer.writerows(rows)


def short(value):
    return "" if value is None or math.isnan(value) else f"{value:.6g}"


def write_csv(path, c):
    """The table of final values."""
    rows = []
    for row in c.rows:
        low, high = row.get("interval") or (None, None)
        values = (row["mean"], row["std"], row.get("difference"), low, high)
        start = [row["environment"], row["side"], row["seeds"]]
        rows.append([*start, *map(short, values), row.get("verdict", "")])
    write_rows(path, "environment side seeds mean std difference low high in_words", rows)


def write_runs(path, c):
    """One row for each run, those that do not count too."""
    rows = []
    for label, runs in c.sides.items():
        for run in runs:
            start, values = [run.env_id, label, run.seed], ["", 0, run.step, ""]
            if len(run.rows):
                final = run.final(c.window, c.ends_at(run))
                num_episodes = round(episodes_of(run.rows).sum())
                values = [short(final), num_episodes, run.step, f"{run.rows[-1, 2]:.1f}"]
            rows.append([*start, *values, "no" if run.state else "yes", run.state, run.name])
    header = "environment side seed final episodes steps seconds counts why_not run"
    write_rows(path, header, rows)


def write_curves(path, c):
    """The mean curves of the plots and their standard deviation, over steps and over seconds."""
    rows = []
    for axis, on_axis in c.curves.items():
        for env_id, (grid, drawn) in on_axis.items():
            for label, (_, mean, std) in drawn.items():
                for x, *values in zip(grid, mean, std, strict=True):
                    if not math.isnan(values[0]):
                        rows.append([env_id, label, axis, short(x), *map(short, values)])
    write_rows(path, "environment side axis x mean std", rows)
