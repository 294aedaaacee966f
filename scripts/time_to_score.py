"""How long a script of benchmark/fast takes from the shell to an agent that scores.

    python scripts/time_to_score.py benchmark/fast/cartpole.sh --score 475
    python scripts/time_to_score.py --rebuild    # only the table of docs/time-to-score.md

Runs the script with seeds that were not used to tune it, in an empty folder, one after the other.
The clock starts before the shell and stops when the program has ended, with its checkpoint
written; imports and compilation are in it. Training is what the program's own log spans. Then
cleanrl_utils.enjoy plays 100 fresh episodes with the checkpoint: their mean is the score.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
from build_results import write  # noqa: E402

from cleanrl_utils.events import read_events  # noqa: E402
from cleanrl_utils.runs import find_runs, read_run  # noqa: E402

DATA = ROOT / "results" / "time_to_score.json"
PAGE = ROOT / "docs" / "time-to-score.md"
EPISODES = 100


@dataclass
class Args:
    script: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="SCRIPT")] = None
    score: float = 475.0  # mean return of 100 episodes to reach
    seeds: tuple[int, ...] = (101, 102, 103)  # none of them used for tuning
    rebuild: bool = False  # write the table from the data, and measure nothing


def measure(script, seed):
    """Train once as a user would; seconds, steps, and the returns of the agent's episodes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cleanrl").symlink_to(ROOT / "cleanrl")
        start = time.time()
        run_quietly(["sh", script, "--seed", str(seed)], folder, environment)
        seconds = time.time() - start
        (run_folder,) = find_runs(Path(folder, "runs"))
        run = read_run(run_folder)
        enjoy = [sys.executable, "-m", "cleanrl_utils.enjoy", run_folder, "--episodes", EPISODES]
        run_quietly([str(word) for word in enjoy], folder, environment)
        evaluation = json.loads((run_folder / "eval.json").read_text())
        scalars, problems = read_events(run_folder)
        if problems:
            raise SystemExit(f"cannot read {run_folder}: {problems}")
    rates = scalars["charts/SPS"]  # steps since the start of the loop over its seconds
    returns = evaluation["returns"]
    return run, {
        "seed": seed,
        "seconds": round(seconds, 2),
        "training": round(float(rates[-1, 0] / rates[-1, 1]), 2),
        "steps": int(rates[-1, 0]),
        "score": round(sum(returns) / len(returns), 2),
    }


def run_quietly(command, folder, environment):
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")


def table(measurements):
    lines = [
        "| script | environment | target | score of each seed | wall-clock time, s "
        "| training, s | steps | machine | measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, told in sorted(measurements.items()):
        runs = told["runs"]
        cells = [
            f"[`{name}`](../benchmark/fast/{name})",
            told["env_id"],
            f"{told['asked']:g}",
            *(", ".join(f"{run[key]:.4g}" for run in runs) for key in ("score", "seconds")),
            ", ".join(f"{run['training']:.3g}" for run in runs),
            f"{runs[0]['steps']:,}",
            told["machine"],
            told["date"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args):
    measurements = json.loads(DATA.read_text()) if DATA.exists() else {}
    if not args.rebuild:
        if args.script is None or not args.script.is_file():
            raise SystemExit(f"cannot measure {args.script}: name a script of benchmark/fast")
        told = {"asked": args.score, "runs": [], "date": date.today().isoformat()}
        for seed in args.seeds:
            run, figures = measure(args.script.resolve(), seed)
            told["runs"].append(figures)
            print(f"seed {seed}: {figures}", flush=True)
        device = run["device"]
        told["machine"] = f"{os.cpu_count()} CPU cores" if device == "cpu" else device
        told |= {"env_id": run["args"]["env_id"], "commit": run["commit"], "dirty": run["dirty"]}
        measurements[args.script.name] = told
        DATA.write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
    write(PAGE, "time to score", table(measurements))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
