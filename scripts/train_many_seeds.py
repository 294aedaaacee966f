"""Train many seeds of a classic-control JAX file in one vmapped program.

    python scripts/train_many_seeds.py dqn_jax MountainCar-v0 16

Writes results/dqn_jax/MountainCar-v0__16_seeds.json. It runs the file's own training program on
gymnax's environment with default flags. Batched operations round differently, so a single seed does
not reproduce its run in the file; only the distribution over seeds is comparable. A run counts with
the mean return of its last 100 episodes.
"""

import json
import runpy
import sys
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def train(algorithm, env_id, num_seeds, **flags):
    """The returns of all episodes, a list for each of the seeds from 1 on."""
    ours = runpy.run_path(str(ROOT / "cleanrl" / f"{algorithm}.py"))
    args = ours["Args"](env_id=env_id, gymnax=True, **flags)
    envs = ours["make_envs"](args, args.num_envs, None, gym.vector.AutoresetMode.DISABLED)
    init, train = ours["make_program"](args, envs)
    runs = jax.vmap(lambda key: init(key, 0))(
        jnp.stack([jax.random.PRNGKey(seed) for seed in range(1, num_seeds + 1)])
    )
    program = jax.jit(jax.vmap(lambda run: train(run, 100)), donate_argnums=0)
    returns = [[] for _ in range(num_seeds)]
    for _ in range(args.total_timesteps // (100 * max(args.num_envs, args.train_frequency))):
        runs, ((is_over, totals, *_), _) = program(runs)
        for seed, (rows, ends) in enumerate(
            zip(np.asarray(totals), np.asarray(is_over), strict=True)
        ):
            returns[seed] += rows[ends].tolist()
    return returns


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("dqn_jax", "c51_jax") or not sys.argv[3].isdigit():
        raise SystemExit(
            "usage: python scripts/train_many_seeds.py dqn_jax|c51_jax ENV_ID NUMBER_OF_SEEDS"
        )
    algorithm, env_id, num_seeds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    finals = [
        round(float(np.mean(returns[-100:])), 2) for returns in train(algorithm, env_id, num_seeds)
    ]
    told = {
        "mean": round(float(np.mean(finals)), 2),
        "std": round(float(np.std(finals, ddof=1)), 2),
        "each seed": finals,
    }
    (ROOT / "results" / algorithm / f"{env_id}__{num_seeds}_seeds.json").write_text(
        json.dumps(told, indent=1) + "\n"
    )
    print(f"{told['mean']:.2f} ± {told['std']:.2f}: {', '.join(map(str, finals))}")
