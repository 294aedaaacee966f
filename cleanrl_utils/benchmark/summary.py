"""What the benchmark prints at its end: the return of each command, and how to compare them."""

import shlex
from urllib.parse import quote


def print_summary(runs, env_ids):
    """A table of mean ± standard deviation over the seeds, and the command that compares."""
    flags = {run: read_flags(run.run_folder) for run in runs if run.state == "done"}
    done = [run for run in flags if flags[run]]
    if not done:
        return
    from cleanrl_utils.rlops.report import summary  # late: what comes with NumPy takes a second

    settings = {}  # {command: flags of one of its runs}
    for run in done:
        settings.setdefault(run.command, flags[run])
    print(f"\n{summary([run.run_folder for run in done])}\n\nCompare the runs:")
    print(comparison(list(settings.values()), env_ids))


def read_flags(folder):
    """The flags of a run that RLops can compare: with curves, an experiment and an environment."""
    if folder is None or not any(folder.glob("*tfevents*")):
        return None
    from cleanrl_utils.runs import read_run

    try:
        flags = read_run(folder)["args"]
    except Exception:  # missing, damaged, or of another program
        return None
    return flags if {"exp_name", "env_id"} <= flags.keys() else None


def comparison(settings, env_ids):
    """The rlops command with a side for each command, which it is given the flags of."""
    from cleanrl_utils.rlops.sides import HARMLESS, NOT_SETTINGS

    sides = []
    for flags in settings:
        same = [other for other in settings if other["exp_name"] == flags["exp_name"]]
        differing = [
            f"{name}={quote(str(value))}"
            for name, value in flags.items()
            if name not in NOT_SETTINGS | HARMLESS
            and any(other.get(name) != value for other in same)
        ]
        sides.append("?".join(filter(None, [flags["exp_name"], "&".join(differing)])))
    words = ["python", "-m", "cleanrl_utils.rlops", "--filters", *dict.fromkeys(sides)]
    words += ["--env-ids", *env_ids] if env_ids else []
    return shlex.join([*words, "--report"])
