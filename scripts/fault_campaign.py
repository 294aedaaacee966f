"""What do the algorithm files do when things go wrong? Prints a table for docs/how-we-test.md.

    python scripts/fault_campaign.py                       # all four parts, about half an hour
    python scripts/fault_campaign.py kill --kills 20
    python scripts/fault_campaign.py disk                  # needs root: a small tmpfs
    python scripts/fault_campaign.py fuzz --commands 100
    python scripts/fault_campaign.py environments

kill          SIGKILL at random moments, resume, until the run is finished: can it always be
              resumed, is an episode doubled or out of order, and are the bits those of an
              uninterrupted run where the environments are in JAX?
disk          the disk is full in the middle of a run: one line, and does it resume afterwards?
fuzz          random command lines: a finished run or one line, never a traceback
environments  every Gymnasium environment that can be made here: trained, or refused in one line
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.harness import only_run, read_checkpoint, same, scalars  # noqa: E402

KILLED = {
    "ppo": "--total-timesteps 1000000 --checkpoint-interval 2",
    "dqn": "--total-timesteps 300000 --checkpoint-interval 500 --learning-starts 1000",
    "sac_continuous_action": "--env-id Pendulum-v1 --total-timesteps 8000 --learning-starts 200"
    " --checkpoint-interval 100 --checkpoint-buffer",
    "dqn_jax": "--total-timesteps 200000 --checkpoint-interval 1000 --learning-starts 1000",
}
SHORT = {
    "ppo": "--total-timesteps 512",
    "ppo_continuous_action": "--total-timesteps 128 --num-steps 64 --num-minibatches 2",
    "dqn": "--total-timesteps 200 --learning-starts 40 --buffer-size 100",
    "sac_continuous_action": "--total-timesteps 60 --learning-starts 20 --buffer-size 100",
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
NUMBERS = ["0", "-1", "1", "2", "7", "0.5", "1e-3", "1e30", "nan", "inf", "None", "", "x", "9" * 20]
TEXTS = ["", "None", "Acrobot-v1", "no/such:thing", "../up", "a b", "~", "--", "\N{SNOWMAN}"]


def command_of(name, flags):
    return [sys.executable, str(ROOT / "cleanrl" / f"{name}.py"), *flags]


def start(name, flags, folder):
    pipes = dict(stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace")
    return subprocess.Popen(command_of(name, flags), cwd=folder, env=ENVIRONMENT, **pipes)


def run_to_the_end(name, flags, folder, timeout):
    return subprocess.run(
        command_of(name, flags),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )


def outcome(done):
    """How a command ended: finished, one line, or a traceback."""
    if done.returncode == 0:
        return "finished"
    if "Traceback" in done.stderr:
        return "traceback"
    return "one line"


def episodes_in_order(run):
    steps = [step for step, _ in scalars(run).get("charts/episodic_return", [])]
    return steps == sorted(set(steps))


def kill(args):
    dice = random.Random(args.seed)
    for name, flags in KILLED.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as whole:
            folder, words = Path(folder), flags.split()
            kills, finished, run = 0, False, None
            while not finished:
                resumed = ["--resume", str(run)] if run else words
                process = start(name, resumed, folder)
                try:
                    end = dice.uniform(3, 12) if kills < args.kills else 600
                    _, message = process.communicate(timeout=end)
                    finished = process.returncode == 0
                    if not finished:
                        print(f"{name}: could not go on: {message.splitlines()[-1]}")
                        break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    kills += 1
                runs = [path.parent for path in folder.glob("runs/*/run.json")]
                run = runs[0] if runs else None
            order = "in order" if episodes_in_order(run) else "OUT OF ORDER"
            bits = "not compared"
            if "_jax" in name:
                run_to_the_end(name, words, whole, timeout=900)
                equal = same(read_checkpoint(run), read_checkpoint(only_run(Path(whole))))
                bits = "same bits" if equal else "OTHER BITS"
            print(f"| kill | {name} | {kills} kills | finished, episodes {order}, {bits} |")


def disk(args):
    for name, flags in SHORT.items():
        env_id = ["--env-id", "Pendulum-v1"] if "continuous" in name else []
        with tempfile.TemporaryDirectory() as folder:
            mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", folder]
            if subprocess.run(mount, capture_output=True).returncode:
                print("| disk | needs root | | |")
                return
            try:
                often = ["--total-timesteps", "100000", "--checkpoint-interval", "1", *env_id]
                words = flags.split()[2:] + often
                (Path(folder) / "ballast").write_bytes(bytes(300_000))
                failed = run_to_the_end(name, words, folder, timeout=300)
                left = [path.name for path in Path(folder).glob("runs/*/*.tmp")]
                (Path(folder) / "ballast").unlink()
                subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
                runs = list(Path(folder).glob("runs/*/run.json"))
                process = start(name, ["--resume", str(runs[0].parent)], folder)
                time.sleep(15)
                process.terminate()
                _, message = process.communicate(timeout=120)
                goes_on = process.returncode == 0 or "interrupted at step" in message
                reasons = re.findall("cannot .*", failed.stderr)
                reason = reasons[-1] if reasons else "no reason given"
                resumed = "resumes" if goes_on else "DOES NOT RESUME"
                print(f"| disk | {name} | {reason} | {resumed}, left over: {left} |")
            finally:
                subprocess.run(["umount", folder])


def fuzz(args):
    dice = random.Random(args.seed)
    for name, flags in SHORT.items():
        lines = (ROOT / "cleanrl" / f"{name}.py").read_text().splitlines()
        body = lines[lines.index("class Args:") + 1 :]
        known = [line.split(":")[0].strip() for line in body[: body.index("    def check(self):")]]
        known = [flag.replace("_", "-") for flag in known if flag]
        found = Counter()
        for _ in range(args.commands):
            words = flags.split() + (["--env-id", "Pendulum-v1"] if "continuous" in name else [])
            for flag in dice.sample(known, dice.randint(1, 3)):
                words += [f"--{flag}", dice.choice(NUMBERS + TEXTS)]
            with tempfile.TemporaryDirectory() as folder:
                try:
                    done = run_to_the_end(name, words, folder, timeout=120)
                except subprocess.TimeoutExpired:
                    found["still running after two minutes"] += 1
                    continue
            found[outcome(done)] += 1
            if outcome(done) == "traceback":
                print(f"{name} {' '.join(words)}\n{done.stderr[-600:]}")
        print(f"| fuzz | {name} | {args.commands} command lines | {dict(found)} |")


def environments(args):
    import gymnasium as gym

    newest = {}
    for env_id in gym.registry:
        newest[env_id.split("-v")[0]] = env_id
    ids = [env_id for env_id in newest.values() if "/" not in env_id or "phys2d" in env_id]
    for name, flags in SHORT.items():
        found = Counter()
        for env_id in sorted(ids):
            with tempfile.TemporaryDirectory() as folder:
                words = [*flags.split(), "--env-id", env_id]
                done = run_to_the_end(name, words, folder, timeout=300)
            found[outcome(done)] += 1
            if outcome(done) == "traceback":
                print(f"{name} --env-id {env_id}\n{done.stderr[-400:]}")
        print(f"| environments | {name} | {len(ids)} environments | {dict(found)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["kill", "disk", "fuzz", "environments"])
    parser.add_argument("--kills", type=int, default=20, help="kills of each file")
    parser.add_argument("--commands", type=int, default=100, help="command lines of each file")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| part | file | what was done | what happened |\n|---|---|---|---|", flush=True)
    for part in args.parts:
        {"kill": kill, "disk": disk, "fuzz": fuzz, "environments": environments}[part](args)


if __name__ == "__main__":
    main()
