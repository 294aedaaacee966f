"""Export run folders to results/, as the data behind the published tables and plots.

    python scripts/export_runs.py ppo runs        # from runs/ to results/ppo/<env_id>__<seed>.csv
    python scripts/export_runs.py ppo runs --add  # beside other runs that results/ppo has already

A CSV has one row per finished episode; of more than 2,100 episodes, it has the last 100 and 2,000
means of those before. Every run of the file is exported. Two runs of the same environment and seed
stop the export; with --add, a run replaces the one that results/ has, and without it, the others
are deleted. An unfinished run stops it as well, unless --partial is given: then the run is exported
as far as it went, and the table says so. Where the export stops, results/ stays as it is.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
from campaign import done_folders  # noqa: E402

from cleanrl_utils.events import decode, read_events, read_records  # noqa: E402
from cleanrl_utils.runs import find_runs, is_finished, last_step, read_run  # noqa: E402

RESULTS = ROOT / "results"
PACKAGES = (
    "gymnasium",
    "numpy",
    "torch",
    "mujoco",
    "ale-py",
    "envpool",
    "jax",
    "flax",
    "optax",
    "gymnax",
    "JAXtari",
    "jaxmarl",
    "minigrid",
    "stable-baselines3",
    "sb3-contrib",
    "sbx-rl",
    "brax",
)


def thin(episodes):
    before, last = episodes[:-100], episodes[-100:]
    return (
        episodes
        if len(before) <= 2000
        else [*(part.mean(0) for part in np.array_split(before, 2000)), *last]
    )


def save_episodes(path, episodes):
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "episodic_return", "seconds"])
        for step, value, seconds in thin(episodes):
            rows.writerow([round(step), f"{value:g}", f"{seconds:.1f}"])


def place(name):
    """Runs are listed by environment, then by seed: 2 before 10."""
    env_id, seed = name.split("__")
    return env_id, int(seed)


def first_second(folder):
    """When a run logged its first scalar; a file of a resumed run may have none."""
    for path in sorted(folder.glob("*tfevents*")):
        *records, _ = read_records(path)
        logged, *_ = decode(*records)
        if logged:
            return min(rows[0, 3] for parts in logged.values() for rows in parts)


def read_episodes(folder, about, partial, done):
    """Rows (step, return, seconds since the start) and the last step of a run that may be exported.

    done has the names of folders that need no checkpoint to count as finished."""
    scalars, problems = read_events(folder, cache=False)
    if problems and not partial:
        raise SystemExit(f"{folder}: {problems[0]}")
    steps = last_step(scalars)
    has_ended = folder.name in done or list(folder.glob("checkpoint.*"))
    if not partial and not (has_ended and is_finished(about, scalars)):
        raise SystemExit(f"{folder} is not finished: it stands at step {steps}")
    if "charts/episodic_return" not in scalars:
        raise SystemExit(f"{folder}: no episode has ended")
    since_start = first_second(folder) - about["start_time"]  # scalars count from the first one
    return scalars["charts/episodic_return"] + np.array([0, 0, since_start]), steps


def export(algorithm, runs, partial=False, add=False):
    folders = {}
    for folder in find_runs(runs):
        about = read_run(folder)
        if about["args"]["exp_name"] == algorithm:
            # without the module that registers it
            env_id = about["args"]["env_id"].split(":")[-1].replace("/", "-")
            name = f"{env_id}__{about['args']['seed']}"
            if name in folders:
                raise SystemExit(f"{name} was run twice: {folders[name]} and {folder}")
            folders[name] = folder
    if not folders:
        raise SystemExit(f"{runs} has no run of {algorithm}")

    done, episodes = done_folders(Path(runs)), {}
    path = RESULTS / algorithm / "runs.json"
    settings = json.loads(path.read_text()) if add and path.exists() else {}
    for name, folder in folders.items():
        about = read_run(folder)
        episodes[name], steps = read_episodes(folder, about, partial, done)
        versions = {
            package: about["packages"][package]
            for package in PACKAGES
            if package in about["packages"]
        }
        told = {
            "args": about["args"],
            "commit": about["commit"],
            "device": about["device"],
            "python": about["python"],
        }
        if about.get("dirty"):
            told["dirty"] = True
        settings[name] = told | {"packages": versions, "steps": steps}
    path.parent.mkdir(exist_ok=True)
    for old in path.parent.glob("*.csv") if not add else ():
        if old.stem not in settings:
            old.unlink()
    for name, rows in episodes.items():
        save_episodes(path.with_name(f"{name}.csv"), rows)
    in_order = dict(sorted(settings.items(), key=lambda item: place(item[0])))
    path.write_text(json.dumps(in_order, indent=1) + "\n")
    print(f"{len(folders)} runs in {RESULTS / algorithm}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("algorithm", help="the runs' --exp-name, and the folder in results/")
    parser.add_argument("runs", help="folder of run folders")
    parser.add_argument("--partial", action="store_true", help="unfinished runs, too")
    parser.add_argument("--add", action="store_true", help="keep what results/ has of other runs")
    export(**vars(parser.parse_args()))
