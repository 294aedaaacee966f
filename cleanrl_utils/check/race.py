"""Train a copy and its parent at the same time on one core each: speed, profile, and returns."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from cleanrl_utils import bands
from cleanrl_utils.events import read_events

SECONDS = 40  # of each of two rounds, after which cores and seeds are swapped
WARM_UP = 0.25  # share of a round that does not count
TASKS = ("CartPole-v1", "InvertedPendulum-v4", "Pong-v5", "Breakout-MinAtar")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def choose_task(parent):
    """A quick environment with published runs, or the first with any, or None for the default."""
    ids = [band["env_id"] for band in bands.read_bands(parent)]
    return next((env_id for env_id in TASKS if env_id in ids), ids[0] if ids else None)


def start(file, folder, seed, task, core):
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--seed", str(seed), *(["--env-id", task] if task else [])]
    sampler = [sys.executable, "-m", "cleanrl_utils.check.sampler"]
    command = [*sampler, str(folder / "profile.json"), str(file), *flags]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(Path(file).parent), root, os.environ.get("PYTHONPATH", "")])
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("w"),
    )


def stop(process):
    """As Ctrl+C does: the file saves a checkpoint and ends."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read(folder):
    """(run folder, SPS rows, episodes, profile, last line of stderr) of a run."""
    errors = (folder / "stderr").read_text().strip().splitlines() or [""]
    run = next(iter(sorted(folder.glob("runs/*/"))), None)
    scalars = read_events(run, cache=False)[0] if run else {}
    profile = folder / "profile.json"
    shares = json.loads(profile.read_text()) if profile.exists() else {}
    nothing = np.zeros((0, 3))
    episodes = scalars.get("charts/episodic_return", nothing)
    return run, scalars.get("charts/SPS", nothing), episodes, shares, errors[-1]


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
        processes = {
            name: start(path, folder / f"{name}{number}", number, task, core)
            for name, (path, core) in pairs.items()
        }
        try:
            wait_for_first_steps(folder, number, processes)
            end = time.time() + seconds
            while time.time() < end and any(p.poll() is None for p in processes.values()):
                time.sleep(0.2)
        finally:
            for process in processes.values():
                stop(process)
        for name in processes:
            runs[name].append(read(folder / f"{name}{number}"))
        cores = cores[::-1]
    return runs


def wait_for_first_steps(folder, number, processes, most=60):
    """Until both have imported what they need."""
    end = time.time() + most
    while time.time() < end and all(p.poll() is None for p in processes.values()):
        if all(list(folder.glob(f"{name}{number}/runs/*/*tfevents*")) for name in processes):
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
