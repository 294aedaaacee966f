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
from cleanrl_utils.runs import read_run
from cleanrl_utils.tables import text_table

# algorithm: peer: its name, its program in speed/peers, and its packages, without a version that of
# constraints.txt; or another of our files
SB3 = "stable-baselines3==2.9.2 torch gymnasium numpy tensorboard"
SBX = "sbx-rl==0.28.0 jax jaxlib flax optax torch gymnasium numpy tensorboard"
MUJOCO = " mujoco imageio"
REJAX = "rejax==0.1.3 gymnax==0.0.9 jax jaxlib flax optax numpy six"


def sb3(algorithm, more=""):
    program = f"stable_baselines.py stable_baselines3 {algorithm}"
    return {"sb3": ("Stable-Baselines3", program, SB3 + more)}


def sbx(algorithm, more=""):
    return {"sbx": ("SBX", f"stable_baselines.py sbx {algorithm}", SBX + more)}


PEERS = {
    "ppo": sb3("PPO") | sbx("PPO"),
    "ppo_jax": {"rejax": ("rejax", "rejax_ppo.py", REJAX), "ppo": ("cleanrl/ppo.py", "ppo", "")},
    "pqn_jax": {"rejax": ("rejax", "rejax_pqn.py", REJAX), "pqn": ("cleanrl/pqn.py", "pqn", "")},
    "pqn_atari_envpool": {
        "ppo_atari_envpool": ("cleanrl/ppo_atari_envpool.py", "ppo_atari_envpool", "")
    },
    "dqn": sb3("DQN"),
    "dqn_jax": {"dqn": ("cleanrl/dqn.py", "dqn", "")},
    "ppo_continuous_action": sb3("PPO", MUJOCO),
    "td3_continuous_action": sb3("TD3", MUJOCO),
    "sac_continuous_action": sb3("SAC", MUJOCO),
    "td3_continuous_action_jax": sbx("TD3", MUJOCO),
    "sac_continuous_action_jax": sbx("SAC", MUJOCO),
}
# for ours and its peers, beside those of the command line: short runs must get to learn, too
FLAGS = {
    name: ["--env-id", "HalfCheetah-v4", "--learning-starts", 100]
    for name in PEERS
    if name.startswith(("td3", "sac"))
}
# every six calls of the program: at other calls, logs are one call late
FLAGS |= {name: ["--checkpoint-interval", 96] for name in ("ppo_jax", "pqn_jax")}
# 30 whole calls, 6 of them warm-up: a shorter last call would be compiled while it is measured
TIMESTEPS = dict.fromkeys(["ppo_jax", "pqn_jax"], 30 * 16 * 512)
WARM_UP = 0.2  # share of the steps that does not count
TOO_SMALL = "total_timesteps is too small: nothing is left to measure after the warm-up"
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
    rounds: int = 5  # how many times each program runs
    total_timesteps: int | None = None  # steps of each run (51,200, ppo_jax and pqn_jax 245,760)
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
        raise SystemExit(TOO_SMALL)
    return {"steps": marks[-1][0] - marks[0][0], "seconds": marks[-1][1] - marks[0][1]}


def run(program, command, folder, core=None):
    environment = os.environ | ONE_CPU_THREAD
    if "PIP_FIND_LINKS" in os.environ:
        environment["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
    on_core = [] if core is None else ["taskset", "--cpu-list", core]
    command = [str(word) for word in (*on_core, *command)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} failed: {processes.why(done.stderr, done.returncode)}")
    return done.stdout.strip().splitlines()[-1]


def run_ours(file, flags, folder, core=None):
    """What run.json says, and the marks: each step and time at which it logged."""
    folder.mkdir(exist_ok=True)
    run("ours", [sys.executable, file, *flags], folder, core)
    (run_folder,) = (folder / "runs").iterdir()
    logged = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    if "charts/SPS" not in logged.Tags()["scalars"]:
        raise SystemExit(TOO_SMALL)
    steps = {event.wall_time: event.step for event in logged.Scalars("charts/SPS")}
    return read_run(run_folder), [(step, when) for when, step in steps.items()]


def run_peer(peer, program, packages, settings, folder, core, *more):
    """What a peer prints, such as its versions and marks; uv makes an environment for it."""
    uv_run = [find_uv(), *"run --quiet --no-project --isolated --python".split(), sys.executable]
    name, *words = program.split()
    command = [*uv_run, *with_packages(packages), "python", PROGRAMS / name, *words, settings]
    return json.loads(run(peer, [*command, *more], folder, core))


def find_uv():
    return shutil.which("uv") or shutil.which(ROOT / ".uv/bin/uv")


def with_packages(packages):
    """uv's --with flags for these packages, with versions from constraints.txt by default."""
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    for package in packages.split():
        pinned = [line for line in tested if line.startswith(f"{package}==")]
        for line in [package] if "==" in package else pinned:
            yield from ("--with", line)


def print_table(names, rounds):
    """One row per program: median rate, range, and medians of the ratios of each round."""
    rates = {
        program: [figures[program]["steps"] / figures[program]["seconds"] for figures in rounds]
        for program in names
    }

    def ratio(program, other):
        return median(x / y for x, y in zip(rates[program], rates[other], strict=True))

    rows = []
    for program, name in names.items():
        of_it = rates[program]
        span = f"{min(of_it):,.0f} - {max(of_it):,.0f}"
        faster = f"{ratio('ours', program):.2f} times as fast"
        faster = "" if program in ("ours", "bare") else faster
        rows.append([name, f"{median(of_it):,.0f}", span, faster, f"{ratio(program, 'bare'):.1%}"])
    header = ["program", "steps/s", "min - max", "ours is", "of bare environments"]
    print("\n".join(text_table(header, rows, numbers="right")))


def run_round(args, seed, timesteps):
    """Run each program once. Returns run.json of ours, and versions and figures of all."""
    file, all_peers = ROOT / "cleanrl" / f"{args.algorithm}.py", PEERS[args.algorithm]
    flags = ["--seed", seed, "--total-timesteps", timesteps, *FLAGS.get(args.algorithm, [])]
    core, other_core = None, None
    if args.side_by_side:
        core, other_core = sorted(os.sched_getaffinity(0))[:2][:: (-1) ** seed]
    versions, marks = {}, {}
    # a folder of its own, so that no run lands where the user is
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        racing = pool.submit(run_ours, file, flags, folder / "ours", core)
        if args.side_by_side:  # the settings are in run.json, whole from the start
            while not racing.done() and not list(folder.glob("ours/runs/*[0-9]/run.json")):
                time.sleep(0.1)
        if racing.done() or not args.side_by_side:
            racing.result()  # waits, and says what went wrong
        (run_folder,) = (folder / "ours" / "runs").iterdir()
        settings = json.dumps(read_run(run_folder)["args"])
        for peer in args.peers:
            _, program, packages = all_peers[peer]
            if packages:
                done = run_peer(peer, program, packages, settings, folder, other_core)
                versions[peer], marks[peer] = done["versions"], done["marks"]
            else:
                ours = file.with_stem(program)
                _, marks[peer] = run_ours(ours, flags, folder / peer, other_core)
        about, marks["ours"] = racing.result()
        versions["ours"] = about["packages"]
        bare = [sys.executable, PROGRAMS / "bare_envs.py", settings, file]
        marks["bare"] = json.loads(run("bare environments", bare, folder))["marks"]
    beside = {}
    if args.side_by_side:
        beside = {"ours": marks[args.peers[0]], args.peers[0]: marks["ours"]}
    programs = ("ours", *args.peers, "bare")
    figures = {program: measure(marks[program], beside.get(program, ())) for program in programs}
    return about, versions, figures


def check(args):
    """Refuse what cannot be measured, and fill in all peers where none is named."""
    if args.algorithm not in PEERS:
        raise SystemExit(f"unknown algorithm {args.algorithm}: choose from {', '.join(PEERS)}")
    known = PEERS[args.algorithm]
    names = ", ".join(known)
    args.peers = tuple(known) if args.peers is None else args.peers
    if unknown := set(args.peers) - set(known):
        unknown = ", ".join(sorted(unknown))
        raise SystemExit(f"unknown peer {unknown}: {args.algorithm} has {names}")
    if args.side_by_side and len(args.peers) != 1:
        raise SystemExit(f"--side-by-side is for one peer: add --peers with one of {names}")
    if args.side_by_side and not (shutil.which("taskset") and len(os.sched_getaffinity(0)) > 1):
        raise SystemExit("--side-by-side needs Linux and two cores")
    if args.rounds < 1:
        raise SystemExit("rounds must be at least 1")
    if args.json:
        with explain("write --json"):
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.open("a").close()
    if any(known[peer][2] for peer in args.peers) and not find_uv():
        how = "`make .uv/bin/uv` puts it into this folder"
        raise SystemExit(f"uv is needed to install the peers: {how}")


def main(args):
    check(args)
    timesteps = args.total_timesteps
    if timesteps is None:
        timesteps = TIMESTEPS.get(args.algorithm, 51_200)
    rounds = []
    for seed in range(1, args.rounds + 1):
        about, versions, figures = run_round(args, seed, timesteps)
        rounds.append(figures)
        rates = [f"{name} {done['steps'] / done['seconds']:,.0f}" for name, done in figures.items()]
        print(f"round {seed} of {args.rounds}, steps/s: {', '.join(rates)}", file=sys.stderr)

    ours = about["args"]
    how = "one CPU thread" + (" each, at the same time" if args.side_by_side else "")
    print(f"\n{ours['env_id']}, {ours['num_envs']} environments, {how}; ", end="")
    print(f"medians over rounds: {args.rounds}")
    print(f"{timesteps:,} steps a run, of which the first {WARM_UP:.0%} do not count\n")
    names = {"ours": f"cleanrl/{args.algorithm}.py"}
    names |= {peer: PEERS[args.algorithm][peer][0] for peer in args.peers}
    print_table(names | {"bare": "bare environments"}, rounds)
    if args.json:
        figures = {
            "algorithm": args.algorithm,
            "settings": ours,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "versions": versions,
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
