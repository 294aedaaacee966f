"""A stand-in for an algorithm file that the tuner's tests can run in a second: its returns are
known, and it can misbehave."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


@dataclass
class Args:
    env_id: str = "A"
    seed: int = 1
    total_timesteps: int = 100
    x: float = 1.0  # the return grows from 0 to 10 times this
    mode: str = "good"
    seconds: float = 0.0  # how long it takes
    hang: str = "nowhere"  # where it takes ten minutes: in folders with this in their path
    track: bool = False
    wandb_project_name: str = "cleanRL"
    wandb_entity: str | None = None


def returns(args):
    """What is logged: 10 x times the share of the steps done, one more for each seed, ten times as
    much in environment B."""
    scale = 10 if args.env_id == "B" else 1
    return [
        (step, scale * (10 * args.x * step / args.total_timesteps + args.seed))
        for step in range(1, args.total_timesteps + 1)
    ]


if __name__ == "__main__":
    args = tyro.cli(Args)
    args.seconds = 600 if args.hang in os.getcwd() else args.seconds
    if args.mode == "crash":
        print("some words")
        raise SystemExit("x must be smaller")
    run = Path("runs", f"{args.env_id}__toy__{args.seed}__{int(time.time())}")
    run.mkdir(parents=True)
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("WANDB_", "OMP_"))
    }
    (run / "run.json").write_text(json.dumps({"args": asdict(args), "variables": variables}))
    if args.seconds:  # as environments in processes of their own
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        Path("pids").write_text(f"{os.getpid()} {child.pid}")
    writer = EventFileWriter(str(run))
    for step, value in [] if args.mode == "silent" else returns(args):
        value = (
            math.nan
            if step == {"nan": 10, "nan at the end": args.total_timesteps}.get(args.mode)
            else value
        )
        values = [
            Summary.Value(tag="charts/episodic_return", simple_value=value),
            Summary.Value(tag="other", simple_value=7),
        ]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        time.sleep(args.seconds / args.total_timesteps)
    writer.close()
    print("the end")
    if args.seconds:
        child.kill()
