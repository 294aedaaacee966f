"""A stand-in for an algorithm file that the tuner's tests run in a fifth of a second: its returns
are known, and it can misbehave. It writes its events by hand, since TensorBoard's writer alone
takes three times as long to import."""

import argparse
import functools
import json
import math
import os
import struct
import subprocess
import sys
import time
from dataclasses import MISSING, dataclass, fields
from pathlib import Path


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


def parse():
    parser = argparse.ArgumentParser()
    for field in fields(Args):
        name = "--" + field.name.replace("_", "-")
        assert field.default is not MISSING
        if field.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = field.type if field.type in (int, float) else str
            parser.add_argument(name, type=kind, default=field.default)
    return Args(**vars(parser.parse_args()))


def returns(args):
    """What is logged: 10 x times the share of the steps done, one more for each seed, ten times as
    much in environment B."""
    scale = 10 if args.env_id == "B" else 1
    return [
        (step, scale * (10 * args.x * step / args.total_timesteps + args.seed))
        for step in range(1, args.total_timesteps + 1)
    ]


@functools.cache
def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc_table()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def record(step, scalars):
    """An event with scalars, as in an event file of TensorBoard."""
    summary = b""
    for tag, value in scalars.items():
        content = b"\x0a" + varint(len(tag)) + tag.encode() + b"\x15" + struct.pack("<f", value)
        summary += b"\x0a" + varint(len(content)) + content
    event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + varint(step)
    event += b"\x2a" + varint(len(summary)) + summary
    length = struct.pack("<Q", len(event))
    return length + masked_crc(length) + event + masked_crc(event)


def main():
    args = parse()
    if args.hang in os.getcwd():
        args.seconds = 600
    if args.mode == "crash":
        print("some words")
        raise SystemExit("x must be smaller")
    run = Path("runs", f"{args.env_id}__toy__{args.seed}__{int(time.time())}")
    run.mkdir(parents=True)
    about = {"file": "toy.py", "args": vars(args), "variables": dict(os.environ)}
    (run / "run.json").write_text(json.dumps(about))
    if args.seconds:  # as environments in processes of their own
        child = subprocess.Popen(["sleep", "600"])
        Path("pids").write_text(f"{os.getpid()} {child.pid}")
    with (run / "events.out.tfevents.1").open("wb", buffering=0) as events:
        for step, value in [] if args.mode == "silent" else returns(args):
            if step == {"nan": 10, "nan at the end": args.total_timesteps}.get(args.mode):
                value = math.nan
            events.write(record(step, {"charts/episodic_return": value, "other": 7}))
            time.sleep(args.seconds / args.total_timesteps)
        if args.mode == "silent":
            events.write(record(1, {"other": 7}))
    print("the end")
    if args.seconds:
        child.kill()


if __name__ == "__main__":
    sys.exit(main())
