"""Export the policies of docs/try-it.md: a ppo.py run on CartPole-v1 at several steps, as JSON.

    python -m cleanrl_utils.enjoy runs --snapshots      # first, in a terminal of its own
    python cleanrl/ppo.py --checkpoint-interval 4
    python scripts/export_try_it.py runs/<run> docs/try-it/cartpole.json

It takes ten of the snapshots, closer together at the start, where most is learned, and evaluates
each of them over 20 episodes in Gymnasium.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from cleanrl import ppo  # noqa: E402
from cleanrl_utils import export as policies  # noqa: E402

EPISODES, COUNT = 20, 10


def evaluate(checkpoint, episodes):
    """Returns of whole games, by the file's own load_policy."""
    torch.manual_seed(0)
    envs = ppo.make_envs(SimpleNamespace(env_id="CartPole-v1"), 1)
    policy, returns = ppo.load_policy(checkpoint, envs), []
    obs, _ = envs.reset(seed=1000)
    is_last = np.zeros(1, bool)
    while len(returns) < episodes:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += [float(infos["episode"]["r"][0])] if is_last[0] else []
    return returns


def export(run, episodes=EPISODES):
    about = json.loads((run / "run.json").read_text())
    if about["file"] != "ppo.py" or about["args"]["env_id"] != "CartPole-v1":
        raise SystemExit(f"{run} is not a run of ppo.py on CartPole-v1")
    paths = sorted((run / "snapshots").glob("*.pt"), key=lambda path: int(path.stem))
    if not paths:
        raise SystemExit(f"{run} has no snapshots: docs/try-it.md says how to keep them")
    steps = np.array([int(path.stem) for path in paths])
    wanted = np.geomspace(steps[0], steps[-1], COUNT)
    chosen = sorted({int(np.abs(np.log(steps / step)).argmin()) for step in wanted})
    checkpoints = []
    envs = ppo.make_envs(SimpleNamespace(env_id="CartPole-v1"), 1)
    for path in (paths[i] for i in chosen):
        checkpoint = torch.load(path, weights_only=True)
        returns = evaluate(checkpoint, episodes)
        graph = policies.read_policy(ppo.load_policy(checkpoint, envs), envs)
        layers = policies.read_layers(policies.trace(graph, envs), digits=4)
        told = {
            "step": int(path.stem),
            "mean_return": float(np.mean(returns)),
            "episodes": episodes,
        }
        checkpoints.append(told | {"layers": layers})
        print(f"step {told['step']:,}: mean return {told['mean_return']:.1f}")
    return {"seed": about["args"]["seed"], "commit": about["commit"], "checkpoints": checkpoints}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python scripts/export_try_it.py RUN_FOLDER FILE")
    Path(sys.argv[2]).write_text(
        json.dumps(export(Path(sys.argv[1])), separators=(",", ":")) + "\n"
    )
