"""Export the policies of docs/try-it.md: a run of a PyTorch file at several steps, as JSON.

    python -m cleanrl_utils.enjoy runs --snapshots      # first, in a terminal of its own
    python cleanrl/ppo.py --checkpoint-interval 4
    python scripts/export_try_it.py runs/<run> docs/try-it/cartpole.json 10

It takes as many of the snapshots as the last word says, closer together at the start, where most
is learned, and evaluates each of them over 20 episodes in Gymnasium, acting as the page does: PPO
samples discrete actions, others are the greedy ones.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
import film_agents  # noqa: E402

from cleanrl_utils import enjoy  # noqa: E402
from cleanrl_utils import export as policies  # noqa: E402

ENV_IDS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1")  # those of try-it.js
EPISODES, COUNT = 20, 5


def export(run, count=COUNT, episodes=EPISODES):
    about = enjoy.read_run(run)
    if about["args"].get("env_id") not in ENV_IDS or "_jax" in about["file"]:
        raise SystemExit(f"{run} is not a run of a PyTorch file on {', '.join(ENV_IDS)}")
    paths = sorted((run / "snapshots").glob("*.pt"), key=lambda path: int(path.stem))
    if not paths:
        raise SystemExit(f"{run} has no snapshots: docs/try-it.md says how to keep them")
    steps = np.array([int(path.stem) for path in paths])
    wanted = np.geomspace(steps[0], steps[-1], count)
    chosen = sorted({int(np.abs(np.log(steps / step)).argmin()) for step in wanted})
    checkpoints = []
    for path in (paths[i] for i in chosen):
        checkpoint = enjoy.load_checkpoint(path)
        is_greedy = "Pendulum" in about["args"]["env_id"]
        torch.manual_seed(0)
        _, envs, policy = enjoy.make_agent(run, checkpoint, deterministic=is_greedy)
        returns, _ = enjoy.play(envs, policy, episodes, seed=1000)
        _, envs, policy = enjoy.make_agent(run, checkpoint)
        graph = policies.read_policy(policy, envs)
        told = {
            "step": int(path.stem),
            "mean_return": float(np.mean(returns)),
            "episodes": episodes,
        }
        told |= policies.make_document(policies.trace(graph, envs), graph, {}, digits=4)
        if about["file"].startswith("ppo") and told["action"] == "argmax":
            told["action"] = "sample"
        checkpoints.append(told)
        print(f"step {told['step']:,}: mean return {told['mean_return']:.1f}")
    about |= {"command": film_agents.command(run), "seed": about["args"]["seed"]}
    names = ("file", "command", "seed", "commit")
    return {name: about[name] for name in names} | {"checkpoints": checkpoints}


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit("usage: python scripts/export_try_it.py RUN_FOLDER FILE [COUNT]")
    told = export(Path(sys.argv[1]), *map(int, sys.argv[3:]))
    Path(sys.argv[2]).write_text(json.dumps(told, separators=(",", ":")) + "\n")
