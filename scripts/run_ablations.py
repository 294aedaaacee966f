"""Run the ablations of docs/rl-algorithms/ppo-details.md: PPO with and without each detail.

    python scripts/run_ablations.py --workers 16 --minutes 8    # as many seeds as there is time for
    python scripts/report_ablations.py                          # then plots and table of the page

scripts/ablations.toml says what is removed, and on which task. The changed files are in
runs/ablations/. cleanrl_utils.benchmark makes the runs, the first seed of everything first, so the
same command resumes them. The data of finished runs goes to results/ablations/: for each hundredth
of a run, how many episodes ended in it and their mean return.
"""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # so that this runs from any folder
from cleanrl_utils.events import read_events  # noqa: E402
from cleanrl_utils.runs import is_finished, read_run  # noqa: E402

PLAN = tomllib.loads((ROOT / "scripts" / "ablations.toml").read_text())
TASKS = {task["name"]: task for task in PLAN["task"]}
BINS = 100  # of a run


@dataclass
class Args:
    workers: int = 2  # runs at a time
    num_seeds: int = 5  # seeds of each
    minutes: float = 60  # after which what still runs is stopped; what is finished counts
    only: tuple[str, ...] = ()  # details to run, such as core_5, with their baselines
    total_timesteps: int | None = None  # for a short try: the data then goes to the runs' folder
    folder: Path = Path("runs/ablations")  # for the changed files, the journal and the logs


def variants(only=()):
    """{name: (task, source, flags)} of the baseline of each task and of each ablation."""
    wanted = [a for a in PLAN["ablation"] if not only or a["detail"].replace(" ", "_") in only]
    found = {}
    for place, task in enumerate(TASKS.values()):
        source = (ROOT / "cleanrl" / f"{task['file']}.py").read_text()
        source, count = re.subn(
            r'( env_id: str = )"[^"]+"', rf'\1"{task["env_id"]}"', source
        )  # the runner takes the default
        assert count == 1, task
        mutations = tomllib.loads(
            (ROOT / "tests" / "mutations" / f"{task['file']}.toml").read_text()
        )["mutation"]
        mine = [a for a in wanted if a["task"] == task["name"]]
        if mine:
            found[f"task_{place}"] = task["name"], source, task["flags"]
        for ablation in mine:
            changed = source
            named = [
                m for name in ablation.get("mutations", ()) for m in mutations if m["name"] == name
            ]
            if len(named) != len(ablation.get("mutations", ())):
                path = f"tests/mutations/{task['file']}.toml"
                raise SystemExit(f"{ablation['detail']}: {path} has no such mutation")
            for edit in [*named, *ablation.get("edits", ())]:
                if changed.count(edit["old"]) != 1:
                    raise SystemExit(
                        f"{ablation['detail']}: {edit['old']!r} must occur once: "
                        "the edit is out of date"
                    )
                changed = changed.replace(edit["old"], edit["new"])
            flags = f"{task['flags']} {ablation.get('flags', '')}".strip()
            found[ablation["detail"].replace(" ", "_")] = task["name"], changed, flags
    return found


def curve(run):
    """(step, episodes, mean return) for each hundredth of a run; None if it is not finished."""
    (scalars, _), about = read_events(run), read_run(run)
    if not is_finished(about, scalars):
        return None
    total, returns = about["args"]["total_timesteps"], [[] for _ in range(BINS)]
    for step, value, _ in scalars.get("charts/episodic_return", ()):
        returns[min(BINS - 1, int(step - 1) * BINS // total)].append(value)
    return [(total * (i + 1) // BINS, len(x), sum(x) / len(x)) for i, x in enumerate(returns) if x]


def collect(steps, runs, out):
    """The data of finished runs of {variant: steps}; of two with one seed, the later.

    What is there of variants that were not run here stays."""
    rows, settings = {}, {}
    for path in sorted(
        runs.glob("*__ablation_*/run.json"),
        key=lambda path: json.loads(path.read_text())["start_time"],
    ):
        about = json.loads(path.read_text())
        name, seed = about["args"]["exp_name"].removeprefix("ablation_"), about["args"]["seed"]
        planned = about["args"]["total_timesteps"] == steps.get(name)  # others were short tries
        if planned and (points := curve(path.parent)):
            rows[name, seed] = points
            told = {
                "env_id": about["args"]["env_id"],
                "total_timesteps": about["args"]["total_timesteps"],
            }
            packages = {
                p: about["packages"][p]
                for p in ("gymnasium", "mujoco", "numpy", "torch")
                if p in about["packages"]
            }
            settings[name] = told | {
                "commit": about["commit"],
                "device": about["device"],
                "packages": packages,
            }
    out.mkdir(parents=True, exist_ok=True)
    if (out / "curves.csv").exists():
        with (out / "curves.csv").open() as file:
            for name, seed, *point in list(csv.reader(file))[1:]:
                if name not in settings:
                    step, count, mean = map(float, point)
                    rows.setdefault((name, int(seed)), []).append((round(step), round(count), mean))
        kept = json.loads((out / "runs.json").read_text())
        settings = kept | settings
    with (out / "curves.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["variant", "seed", "step", "episodes", "mean_return"])
        for (name, seed), points in sorted(rows.items()):
            table.writerows(
                [name, seed, step, count, f"{mean:.6g}"] for step, count, mean in points
            )
    (out / "runs.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    print(f"{len(rows)} finished runs of {len(settings)} variants in {out}")


def write_variants(args):
    """Write the changed files; return their commands, and how many steps each variant trains."""
    files, commands, steps = args.folder / "files", [], {}
    files.mkdir(parents=True, exist_ok=True)
    for name, (_, source, flags) in variants(args.only).items():
        path = files / f"ablation_{name}.py"
        path.write_text(source)
        if args.total_timesteps:
            flags += f" --total-timesteps {args.total_timesteps}"
        steps[name] = int(re.findall(r"--total-timesteps (\S+)", flags)[-1])
        commands.append(f"{shlex.join([sys.executable, str(path)])} {flags} --no-cuda")
    return commands, steps


def main(args):
    commands, steps = write_variants(args)
    words = [sys.executable, "-m", "cleanrl_utils.benchmark", "--num-seeds", str(args.num_seeds)]
    words += ["--workers", str(args.workers), "--folder", str(args.folder)]
    words += [word for command in commands for word in ("--command", command)]
    folders = [str(ROOT), str(ROOT / "scripts")]  # for hidden_velocity.py
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    runner = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path})
    try:
        runner.wait(timeout=args.minutes * 60)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        runner.send_signal(signal.SIGTERM)  # which a background job hears too
        runner.wait()
    if runner.returncode not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise SystemExit("the benchmark failed: no data is collected")
    out = args.folder if args.total_timesteps else ROOT / "results" / "ablations"
    collect(steps, Path("runs"), out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
