"""Train another library on what a published folder of results/ has, for a comparison.

    python scripts/train_peers.py ppo_dict

scripts/results.toml names the environments that are compared, under [ppo_dict.peer]. For each run
of results/ppo_dict on them, the other library trains for as many steps with the same settings and
seed, on one CPU thread. Its episodes go to results/ppo_dict_peer, with settings and versions in
runs.json. A run that is there already is not trained again. uv installs the library into an
environment of its own.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
from export_runs import PACKAGES, place, save_episodes  # noqa: E402

from cleanrl_utils.speed import measure  # noqa: E402

RESULTS = ROOT / "results"
PLAN = tomllib.loads((ROOT / "scripts" / "results.toml").read_text(encoding="utf-8"))
OURS = " tyro psutil filelock tqdm pydantic"  # what our files import
SB3 = measure.SB3 + OURS
CONTRIB = f"sb3-contrib==2.9.2 {SB3}"
SBX = measure.SBX + OURS
BRAX = "brax==0.14.2 jax==0.8.1 jaxlib==0.8.1"  # newer JAX lacks what it calls
PEERS = {  # file: the program in cleanrl_utils/speed/peers, and its packages
    "ppo_multidiscrete": ("stable_baselines.py sb3_contrib MaskablePPO", CONTRIB),
    "ppo_dict": ("stable_baselines.py stable_baselines3 PPO", f"{SB3} minigrid"),
    "ppo_continuous_lstm": ("stable_baselines.py sb3_contrib RecurrentPPO", CONTRIB),
    "qrdqn": ("stable_baselines.py sb3_contrib QRDQN", CONTRIB),
    "ppo_rnn_jax": (
        "stable_baselines.py sb3_contrib RecurrentPPO",
        f"{CONTRIB} jax jaxlib flax optax gymnax six",
    ),
    "ppo_continuous_action_jax": ("brax_ppo.py", BRAX),
    "sac_continuous_action_jax": ("stable_baselines.py sbx SAC", SBX),
    "tqc_continuous_action_jax": ("stable_baselines.py sbx TQC", SBX),
    "crossq_continuous_action_jax": ("stable_baselines.py sbx CrossQ", SBX),
    "droq_continuous_action_jax": ("stable_baselines.py sbx DroQ", SBX),
}


def file_of(folder):
    """Folders are named after a file, with more behind it for other settings."""
    stems = [stem for stem in PEERS if folder.startswith(stem)]
    return max(stems, key=len, default=None)


def git_commit():
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(folder, num_seeds=None):
    stem, envs = file_of(folder), PLAN.get(folder, {}).get("peer", {})
    if not (stem and envs):
        raise SystemExit(f"scripts/results.toml has no [{folder}.peer], or no library is known")
    program, packages = PEERS[stem]
    target = RESULTS / f"{folder}_peer"
    target.mkdir(exist_ok=True)
    path = target / "runs.json"
    ours = json.loads((RESULTS / folder / "runs.json").read_text())
    for name, run in ours.items():
        env_id, seed = place(name)
        told = json.loads(path.read_text()) if path.exists() else {}
        if env_id not in envs or name in told or seed > (num_seeds or seed):
            continue
        settings, file = json.dumps(run["args"]), ROOT / "cleanrl" / f"{stem}.py"
        with tempfile.TemporaryDirectory() as scratch:
            done = measure.run_peer(
                envs[env_id], program, packages, settings, Path(scratch), None, file
            )
        versions = {x.replace("_", "-"): version for x, version in done["versions"].items()}
        save_episodes(target / f"{name}.csv", done["episodes"])
        told[name] = {
            "program": program,
            "args": run["args"],
            "commit": git_commit().removesuffix("-dirty"),
            "device": "cpu",
            "python": platform.python_version(),
            "packages": {x: versions[x] for x in PACKAGES if x in versions},
            "steps": done["marks"][-1][0],
        } | ({"dirty": True} if git_commit().endswith("-dirty") else {})
        told[name] |= {"rows": done["rows"]} if "rows" in done else {}
        in_order = dict(sorted(told.items(), key=lambda item: place(item[0])))
        path.write_text(json.dumps(in_order, indent=1) + "\n")
        num_rows = 1 if "rows" in done else 100
        last = [value for _, value, _ in done["episodes"][-num_rows:]]
        print(f"{name}: {sum(last) / len(last):.2f} by {envs[env_id]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="the folder in results/")
    parser.add_argument("--num-seeds", type=int, help="only seeds up to this one")
    main(**vars(parser.parse_args()))
