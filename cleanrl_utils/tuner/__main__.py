"""The tuner's command line: see python -m cleanrl_utils.tuner --help."""

import runpy
import signal
from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils import tuner as package
from cleanrl_utils.errors import explain


@dataclass
class Args:
    config: tyro.conf.Positional[Path]  # Python file that makes a Tuner called tuner
    num_trials: int | None = None  # finished trials to reach in the study; by default, the config's
    num_seeds: int | None = None  # seeds of each environment in a trial; by default, the config's
    workers: int | None = None  # runs at once; by default, the config's
    storage: str | None = None  # database of the study; by default, the config's
    study_name: str | None = None  # name of the study; by default, the config's


def load(args):
    """The config's tuner, num_trials and num_seeds, with what the flags replace."""
    if not args.config.is_file():
        raise SystemExit(f"there is no {args.config}")
    with explain(f"read {args.config}"):
        names = runpy.run_path(str(args.config))
    tuner = names.get("tuner")
    if not isinstance(tuner, package.Tuner):
        raise SystemExit(f"{args.config} must make a Tuner called tuner")
    for name in ("workers", "storage", "study_name"):
        if getattr(args, name) is not None:
            setattr(tuner, name, getattr(args, name))
    counts = {}
    for name in ("num_trials", "num_seeds"):
        counts[name] = names.get(name) if getattr(args, name) is None else getattr(args, name)
        if counts[name] is None:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"{args.config} sets no {name}: give {flag}")
    return tuner, counts


def main():
    name = "python -m cleanrl_utils.tuner"
    args = tyro.cli(Args, prog=name, description=package.__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C
    tuner, counts = load(args)
    tuner.tune(**counts)


if __name__ == "__main__":
    main()
