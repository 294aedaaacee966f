"""Train a copy and its parent at the same time on one core each: speed, profile, and returns."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cleanrl_utils import bands, processes
from cleanrl_utils.events import read_events

SECONDS = 40  # of each of two rounds; the second has swapped cores and another seed
WARM_UP = 0.25  # share of a round that does not count
TASKS = ("CartPole-v1", "InvertedPendulum-v4", "Pong-v5", "Breakout-MinAtar")


@dataclass
class Run:
    folder: Path | None  # None if the program ended before it made one
    steps: np.ndarray  # rows (step, logged SPS, seconds)
    profile: dict  # {part: how often the sampler saw it}
    output: str


def choose_task(parent, default):
    """A quick environment with published runs, or the file's default if it has any, or another."""
    ids = [band["env_id"] for band in bands.read_bands(parent)]
    if quick := [env_id for env_id in TASKS if env_id in ids]:
        return quick[0]
    if bands.plain_env_id(default) in ids or not ids:
        return default
    return ids[0]


def start(file, folder, seed, task, core):
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--seed", str(seed), "--env-id", task]
    sampler = [sys.executable, "-m", "cleanrl_utils.check.sampler"]
    command = [*sampler, str(folder / "profile.json"), str(file), *flags]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    environment = os.environ | processes.thread_settings() | {"PYTHONPATH": path}
    with (folder / "output").open("wb") as output:
        return processes.start(command, output=output, cwd=folder, env=environment)


def read(folder):
    """What a program left in its folder."""
    run = next(iter(sorted(folder.glob("runs/*/"))), None)
    scalars = read_events(run, cache=False)[0] if run else {}
    profile = folder / "profile.json"
    return Run(
        folder=run,
        steps=scalars.get("charts/SPS", np.zeros((0, 3))),
        profile=json.loads(profile.read_text()) if profile.exists() else {},
        output=(folder / "output").read_text(errors="replace"),
    )


def speed(rows):
    """Steps per second after the warm-up; rows are (step, logged value, seconds)."""
    rows = rows[rows[:, 2] >= WARM_UP * rows[-1, 2]] if len(rows) else rows
    if len(rows) < 3 or rows[-1, 2] <= rows[0, 2]:
        return None
    return (rows[-1, 0] - rows[0, 0]) / (rows[-1, 2] - rows[0, 2])


def race(file, parent_file, folder, task, seconds=SECONDS):
    """Two rounds; returns the two runs of the copy and those of the parent."""
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    cores = cores if len(cores) == 2 else [None, None]
    runs = {"copy": [], "parent": []}
    for number in (1, 2):
        pairs = {"copy": (file, cores[0]), "parent": (parent_file, cores[1])}
        started = {
            name: start(path, folder / f"{name}{number}", number, task, core)
            for name, (path, core) in pairs.items()
        }
        try:
            wait_for_first_steps(folder, number, started)
            end = time.time() + seconds
            while time.time() < end and any(p.poll() is None for p in started.values()):
                time.sleep(0.2)
            for process in started.values():
                processes.ask_to_end(process)  # as Ctrl+C: the file saves a checkpoint
            for process in started.values():
                process.wait()
        finally:
            for process in started.values():
                processes.kill(process)
        for name in started:
            runs[name].append(read(folder / f"{name}{number}"))
        cores = cores[::-1]
    return runs


def wait_for_first_steps(folder, number, started, most=60):
    """Until both have imported what they need."""
    end = time.time() + most
    while time.time() < end and all(p.poll() is None for p in started.values()):
        if all(list(folder.glob(f"{name}{number}/runs/*/*tfevents*")) for name in started):
            return
        time.sleep(0.2)


def shares_of(profiles):
    """Percentages of the parts of both rounds, largest first."""
    total = {}
    for profile in profiles:
        for part, count in profile.items():
            total[part] = total.get(part, 0) + count
    everything = sum(total.values()) or 1
    return {part: total[part] / everything for part in sorted(total, key=total.get, reverse=True)}
