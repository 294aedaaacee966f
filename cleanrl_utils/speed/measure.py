"""Run one of our files and its peers in turn, and compare their training throughput."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_utils import processes
from cleanrl_utils.errors import explain

# algorithm: peer: its name, its program in speed/peers, and its packages, without a version that of
# constraints.txt; or another of our files
SB3 = "stable-baselines3==2.9.2 torch gymnasium numpy tensorboard"
SBX = "sbx-rl==0.28.0 jax jaxlib flax optax torch gymnasium numpy tensorboard"
MUJOCO = " mujoco imageio"
REJAX = "rejax==0.1.3 gymnax==0.0.9 jax jaxlib flax optax numpy six"
PEERS = {
    "ppo": {
        "sb3": ("Stable-Baselines3", "sb3_ppo.py", SB3),
        "sbx": ("SBX", "sbx_ppo.py", SBX),
    },
    "ppo_jax": {"rejax": ("rejax", "rejax_ppo.py", REJAX), "ppo": ("cleanrl/ppo.py", "ppo", "")},
    "dqn": {"sb3": ("Stable-Baselines3", "sb3_dqn.py", SB3)},
    "dqn_jax": {"dqn": ("cleanrl/dqn.py", "dqn", "")},
    "ppo_continuous_action": {"sb3": ("Stable-Baselines3", "sb3_ppo.py", SB3 + MUJOCO)},
    "td3_continuous_action": {"sb3": ("Stable-Baselines3", "sb3_off_policy.py", SB3 + MUJOCO)},
    "sac_continuous_action": {"sb3": ("Stable-Baselines3", "sb3_off_policy.py", SB3 + MUJOCO)},
    "td3_continuous_action_jax": {"sbx": ("SBX", "sbx_off_policy.py", SBX + MUJOCO)},
    "sac_continuous_action_jax": {"sbx": ("SBX", "sbx_off_policy.py", SBX + MUJOCO)},
}
# for ours and its peers, beside those of the command line: short runs must get to learn, too
FLAGS = {
    name: ["--env-id", "HalfCheetah-v4", "--learning-starts", 100]
    for name in PEERS
    if name.startswith(("td3", "sac"))
}
# every six calls of the program: at other calls, logs are one call late
FLAGS["ppo_jax"] = ["--checkpoint-interval", 96]
# 30 whole calls, 6 of them warm-up: a shorter last call would be compiled while it is measured
TIMESTEPS = {"ppo_jax": 30 * 16 * 512}
WARM_UP = 0.2  # share of the steps that does not count
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "peers"
ONE_CPU_THREAD = processes.ONE_THREAD | {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "NPROC": "1",  # the threads that XLA runs operations in beside each other
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",  # faster for SBX, too
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass
class Args:
    algorithm: tyro.conf.Positional[str]  # which of our files to measure, such as ppo
    rounds: int = 5  # how often each program runs
    total_timesteps: int | None = None  # steps of each run (51,200, ppo_jax 245,760)
    peers: tuple[str, ...] | None = None  # what to compare with, such as sb3 (all if not given)
    side_by_side: bool = False  # ours and one peer at the same time, on two cores
    json: Path | None = None  # file for the figures of every round, with versions


def measure(marks, beside=()):
    """Steps and seconds from the end of the warm-up to the last of the (steps done, time) pairs.

    If a program ran beside it, only while that one was past its warm-up and not yet done."""
    for others in filter(None, (marks, beside)):
        first_time = next(when for step, when in others if step >= WARM_UP * others[-1][0])
        marks = [(step, when) for step, when in marks if first_time <= when <= others[-1][1]]
    if len(marks) < 2 or marks[0][0] == marks[-1][0]:
        raise SystemExit(
            "total_timesteps is too small: nothing is left to measure after the warm-up"
        )
    return {"steps": marks[-1][0] - marks[0][0], "seconds": marks[-1][1] - marks[0][1]}


def run(program, command, folder, core=None):
    find_links = (
        {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    )
    command = list(map(str, command if core is None else ["taskset", "--cpu-list", core, *command]))
    environment = os.environ | ONE_CPU_THREAD | find_links
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} failed: {processes.why(done.stderr, done.returncode)}")
    return done.stdout.strip().splitlines()[-1]


def run_ours(file, flags, folder, core=None):
    Path(folder).mkdir(exist_ok=True)
    run("ours", [sys.executable, file, *flags], folder, core)
    (run_folder,) = Path(folder, "runs").iterdir()
    about = json.loads((run_folder / "run.json").read_text())
    events = (
        EventAccumulator(str(run_folder), size_guidance={"scalars": 0})
        .Reload()
        .Scalars("charts/SPS")
    )
    return about, [
        (step, when) for when, step in {event.wall_time: event.step for event in events}.items()
    ]


def with_packages(packages):
    """uv's --with flags for these packages, with versions from constraints.txt by default."""
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    for package in packages.split():
        for line in (
            [package]
            if "==" in package
            else [line for line in tested if line.startswith(f"{package}==")]
        ):
            yield from ("--with", line)


def print_table(names, rounds):
    """One row per program: median rate, range, and medians of the ratios of each round."""
    rates = {
        program: [figures[program]["steps"] / figures[program]["seconds"] for figures in rounds]
        for program in names
    }
    rows = [("program", "steps/s", "min - max", "ours is", "of bare environments")]
    for program, name in names.items():
        times = median(
            ours / theirs for ours, theirs in zip(rates["ours"], rates[program], strict=True)
        )
        share = median(
            theirs / bare for theirs, bare in zip(rates[program], rates["bare"], strict=True)
        )
        span = f"{min(rates[program]):,.0f} - {max(rates[program]):,.0f}"
        faster = f"{times:.2f} times as fast" if program not in ("ours", "bare") else ""
        rows.append((name, f"{median(rates[program]):,.0f}", span, faster, f"{share:.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]))


def main(args):
    file, all_peers = ROOT / "cleanrl" / f"{args.algorithm}.py", PEERS.get(args.algorithm)
    if all_peers is None:
        raise SystemExit(f"unknown algorithm {args.algorithm}: there is {', '.join(PEERS)}")
    peers = tuple(all_peers) if args.peers is None else args.peers
    if unknown := set(peers) - set(all_peers):
        names = ", ".join(sorted(unknown))
        raise SystemExit(f"unknown peer {names}: {args.algorithm} has {', '.join(all_peers)}")
    if args.side_by_side and len(peers) != 1:
        raise SystemExit(
            f"--side-by-side is for one peer: add --peers with one of {', '.join(all_peers)}"
        )
    if args.side_by_side and not (shutil.which("taskset") and len(os.sched_getaffinity(0)) > 1):
        raise SystemExit("--side-by-side needs Linux and two cores")
    if args.rounds < 1:
        raise SystemExit("rounds must be at least 1")
    if args.json:
        with explain("write --json"):
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.open("a").close()
    uv = shutil.which("uv") or shutil.which(ROOT / ".uv/bin/uv")
    if peers and not uv:
        raise SystemExit(
            "uv is needed to install the peers: `make .uv/bin/uv` puts it into this folder"
        )

    rounds, versions = [], {}
    timesteps = (
        TIMESTEPS.get(args.algorithm, 51_200)
        if args.total_timesteps is None
        else args.total_timesteps
    )
    for seed in range(1, args.rounds + 1):
        cores = (
            (None, None)
            if not args.side_by_side
            else sorted(os.sched_getaffinity(0))[:2][:: (-1) ** seed]
        )
        # a folder of its own, so that no run lands where the user is
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            flags = ["--seed", seed, "--total-timesteps", timesteps, *FLAGS.get(args.algorithm, [])]
            racing = pool.submit(run_ours, file, flags, Path(folder, "ours"), cores[0])
            while (
                args.side_by_side
                and not racing.done()
                and not list(Path(folder).glob("ours/runs/*[0-9]/run.json"))
            ):
                time.sleep(0.1)  # the settings are in it, whole from the start
            if racing.done() or not args.side_by_side:
                racing.result()  # waits, and says what went wrong
            (run_folder,) = Path(folder, "ours", "runs").iterdir()
            settings, marks = (
                json.dumps(json.loads((run_folder / "run.json").read_text())["args"]),
                {},
            )
            for peer in peers:
                uv_run = [
                    uv,
                    "run",
                    "--quiet",
                    "--no-project",
                    "--isolated",
                    "--python",
                    sys.executable,
                ]
                _, program, packages = all_peers[peer]
                if not program.endswith(".py"):
                    _, marks[peer] = run_ours(
                        file.with_stem(program), flags, Path(folder, peer), cores[1]
                    )
                    continue
                command = [
                    *uv_run,
                    *with_packages(packages),
                    "python",
                    PROGRAMS / program,
                    settings,
                ]
                printed = json.loads(run(peer, command, folder, cores[1]))
                marks[peer], versions[peer] = printed["marks"], printed["versions"]
            about, marks["ours"] = racing.result()
            beside = {"ours": marks[peers[0]], peers[0]: marks["ours"]} if args.side_by_side else {}
            figures = {
                program: measure(marks[program], beside.get(program, ()))
                for program in ("ours", *peers)
            }
            versions["ours"] = about["packages"]
            bare = run(
                "bare environments",
                [sys.executable, PROGRAMS / "bare_envs.py", settings, file],
                folder,
            )
            figures["bare"] = measure(json.loads(bare)["marks"])
        rounds.append(figures)
        rates = ", ".join(
            f"{program} {done['steps'] / done['seconds']:,.0f}" for program, done in figures.items()
        )
        print(f"round {seed} of {args.rounds}, steps/s: {rates}", file=sys.stderr)

    ours = about["args"]
    how = "one CPU thread" + (" each, at the same time" if args.side_by_side else "")
    print(f"\n{ours['env_id']}, {ours['num_envs']} environments, {how}; ", end="")
    print(f"medians over rounds: {args.rounds}")
    print(f"{timesteps:,} steps a run, of which the first {WARM_UP:.0%} do not count\n")
    peer_names = {peer: all_peers[peer][0] for peer in peers}
    print_table({"ours": f"cleanrl/{file.name}", **peer_names, "bare": "bare environments"}, rounds)
    if args.json:
        machine = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        figures = {
            "algorithm": args.algorithm,
            "settings": ours,
            **machine,
            "versions": versions,
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
