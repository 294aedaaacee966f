"""What the benchmark prints at its end: the return of each command, and how to compare them."""

import shlex
from urllib.parse import quote


def print_summary(runs, env_ids):
    """A table of mean ± standard deviation over the seeds, and the command that compares."""
    done = [run for run in runs if run.state == "done" and has_events(run.run_folder)]
    if not done:
        return
    from cleanrl_utils.rlops.report import summary  # late: what comes with NumPy takes a second
    from cleanrl_utils.runs import read_run

    settings = {}  # {command: flags of one of its runs}
    for run in done:
        if run.command not in settings:
            settings[run.command] = read_run(run.run_folder)["args"]
    print(f"\n{summary([run.run_folder for run in done])}\n\nCompare the runs:")
    print(comparison(list(settings.values()), env_ids))


def has_events(folder):
    return folder is not None and (folder / "run.json").exists() and any(folder.glob("*tfevents*"))


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
