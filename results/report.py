"""Turn the published data into the table and the plot of the docs.

    python results/report.py ppo        # prints the table, writes docs/rl-algorithms/ppo.png

As in the published tables: each run counts with the mean of its last 100 episodes, then mean ± standard deviation of the runs.
A point of the plot is the mean of the last 100 episodes, or of an eighth of a run's where that is fewer. Over steps the line
is the mean of the runs and the band their standard deviation; over seconds each run is by itself.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.append(str(HERE.resolve().parent))  # for the tools, from wherever this is run
from cleanrl_utils.scores import running_mean  # noqa: E402

PUBLISHED = {  # mean ± standard deviation over 3 seeds of the public v1 files, same protocol
    "ppo": {
        "CartPole-v1": "490.04 ± 6.12",
        "Acrobot-v1": "-86.36 ± 1.32",
        "MountainCar-v0": "-200.00 ± 0.00",
    },
    "ppo_jax": {
        "CartPole-v1": "490.04 ± 6.12",
        "Acrobot-v1": "-86.36 ± 1.32",
        "MountainCar-v0": "-200.00 ± 0.00",
    },  # of ppo
    "ppo_jax_minatar": dict.fromkeys(
        ("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar"), "none"
    ),
    "ppo_jaxtari_jax": {"pong": "none", "breakout": "none"},
    "ppo_rnn_jax": {"MemoryChain-bsuite": "none", "MemoryChain-15": "none"},
    "ppo_jax_memory": {
        "MemoryChain-bsuite": "none",
        "MemoryChain-15": "none",
    },  # the same tasks without a memory
    "ppo_atari_envpool": {"Pong-v5": "20.45 ± 0.09", "Breakout-v5": "211.24 ± 151.84"},
    "ppo_atari_envpool_128": {"Breakout-v5": "none"},
    "ppo_rnd_envpool_128": {"Breakout-v5": "none"},
    "ppo_rnd_envpool_8": {"Breakout-v5": "none"},
    "ppo_continuous_action": {
        "HalfCheetah-v4": "1442.64 ± 46.03",
        "Hopper-v4": "2382.86 ± 271.74",
        "InvertedPendulum-v4": "963.09 ± 22.20",
    },
    "ppo_continuous_action_jax": {"brax-ant": "none"},
    "ppo_procgen": {
        "starpilot": "30.99 ± 1.96",
        "bossfight": "8.85 ± 0.33",
        "bigfish": "16.46 ± 2.71",
    },
    "ppg_procgen": {
        "starpilot": "34.82 ± 13.77",
        "bossfight": "10.78 ± 1.90",
        "bigfish": "24.23 ± 10.73",
    },
    "ppo_multidiscrete": {"Taxi-v4": "none"},
    "dqn": {
        "CartPole-v1": "488.69 ± 16.11",
        "Acrobot-v1": "-91.54 ± 7.20",
        "MountainCar-v0": "-194.95 ± 8.48",
    },
    "c51": {
        "CartPole-v1": "481.20 ± 20.53",
        "Acrobot-v1": "-87.70 ± 5.52",
        "MountainCar-v0": "-166.38 ± 27.94",
    },
    "c51_jax": {
        "CartPole-v1": "491.07 ± 9.70",
        "Acrobot-v1": "-86.74 ± 2.19",
        "MountainCar-v0": "-174.30 ± 36.35",
    },
    "dqn_atari": {"PongNoFrameskip-v4": "20.25 ± 0.41"},
    "dqn_atari_jax": {"PongNoFrameskip-v4": "20.43 ± 0.34"},
    "c51_atari": {"PongNoFrameskip-v4": "19.46 ± 0.70"},
    "rainbow_atari": {"PongNoFrameskip-v4": "none"},
    "c51_atari_jax": {"PongNoFrameskip-v4": "19.88 ± 0.31"},
    "dqn_jax": {
        "CartPole-v1": "498.38 ± 2.29",
        "Acrobot-v1": "-88.89 ± 1.56",
        "MountainCar-v0": "-188.90 ± 11.78",
    },
    "ppo_multidiscrete_no_mask": {"Taxi-v4": "none"},
    "ddpg_continuous_action": {
        "HalfCheetah-v4": "10374.07 ± 157.37",
        "Walker2d-v4": "1240.16 ± 390.10",
        "Hopper-v4": "1576.78 ± 818.98",
    },
    "td3_continuous_action": {
        "HalfCheetah-v4": "9583.22 ± 126.09",
        "Walker2d-v4": "4057.59 ± 658.78",
        "Hopper-v4": "3134.61 ± 360.18",
    },
    "sac_continuous_action": {
        "HalfCheetah-v4": "9634.89 ± 1423.73",
        "Walker2d-v4": "3591.45 ± 911.33",
        "Hopper-v4": "2310.46 ± 342.82",
    },
    "tqc_continuous_action_jax": {"HalfCheetah-v4": "none"},
    "droq_continuous_action_jax": {"HalfCheetah-v4": "none"},
    "crossq_continuous_action_jax": {"HalfCheetah-v4": "none"},
}


def read(algorithm):
    """{env_id: {seed: array of rows (step, episodic_return, seconds)}}"""
    data = {env_id: {} for env_id in PUBLISHED[algorithm]}
    for path in sorted((HERE / algorithm).glob("*.csv")):
        env_id, seed = path.stem.split("__")
        with path.open() as file:
            data[env_id][int(seed)] = np.array(list(csv.reader(file))[1:], dtype=float)
    return data


def table(algorithm):
    lines = ["| environment | ours, mean ± std | each seed | public v1 |", "|---|---|---|---|"]
    about = (
        json.loads((HERE / algorithm / "runs.json").read_text())
        if (HERE / algorithm / "runs.json").exists()
        else {}
    )
    for env_id, runs in read(algorithm).items():
        if not runs:
            continue
        published = PUBLISHED[algorithm][env_id]
        finals = [rows[-100:, 1].mean() for rows in runs.values()]
        told = {seed: about.get(f"{env_id}__{seed}", {}) for seed in runs}
        goals = {
            seed: run["args"]["total_timesteps"] for seed, run in told.items() if "steps" in run
        }
        stopped = {
            seed: told[seed]["steps"]
            for seed, goal in goals.items()
            if told[seed]["steps"] < 0.99 * goal
        }
        words = {
            seed: f"the first {steps / 1e6:.2f}M of {goals[seed] / 1e6:g}M steps"
            for seed, steps in stopped.items()
        }
        if len(stopped) == len(runs) and max(stopped.values()) < 1.1 * min(
            stopped.values()
        ):  # cut off together: said once
            env_id, words = f"{env_id}, {words[min(stopped, key=stopped.get)]}", {}
        each = zip(runs, finals, strict=True)
        seeds = ", ".join(
            f"{final:.1f}" + (f" ({words[seed]})" if seed in words else "") for seed, final in each
        )
        spread = f"± {np.std(finals):.2f}" if len(finals) > 1 else "(one seed)"
        lines.append(f"| {env_id} | {np.mean(finals):.2f} {spread} | {seeds} | {published} |")
    return "\n".join(lines)


def plot(algorithm, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = {env_id: runs for env_id, runs in read(algorithm).items() if runs}
    figure, axes = plt.subplots(
        2, len(data), figsize=(4 * len(data), 6), squeeze=False, layout="constrained"
    )
    for i, (env_id, runs) in enumerate(data.items()):
        window = min(
            100, *(1 + len(rows) // 8 for rows in runs.values())
        )  # or short runs would be all mean and no curve
        for row, (column, label) in enumerate([(0, "environment steps"), (2, "seconds")]):
            for rows in runs.values():
                own = np.linspace(0, rows[-1, column], 300)
                curve, seen = running_mean(rows, own, column, window)
                looks = (
                    dict(alpha=0.35, linewidth=0.8) if row == 0 else dict(alpha=0.8, linewidth=1.2)
                )
                axes[row, i].plot(own[seen], curve[seen], color="tab:blue", **looks)
            if (
                row == 0
            ):  # what runs had learned after as many seconds is no mean of anything: some had to wait for others
                grid = np.linspace(0, min(rows[-1, column] for rows in runs.values()), 300)
                curves, seen = zip(
                    *(running_mean(rows, grid, column, window) for rows in runs.values()),
                    strict=True,
                )
                seen = np.all(seen, axis=0)
                mean, std = np.mean(curves, axis=0)[seen], np.std(curves, axis=0)[seen]
                axes[row, i].plot(grid[seen], mean, color="tab:blue")
                axes[row, i].fill_between(
                    grid[seen], mean - std, mean + std, color="tab:blue", alpha=0.15, linewidth=0
                )
            axes[row, i].set(title=env_id if row == 0 else None, xlabel=label)
            axes[row, i].grid(alpha=0.3)
        axes[0, i].xaxis.set_major_formatter(
            lambda n, _: f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1000:.0f}k" if n else "0"
        )
    for row in axes:
        row[0].set_ylabel("episodic return")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PUBLISHED:
        raise SystemExit(
            f"usage: python results/report.py ALGORITHM, one of {', '.join(PUBLISHED)}"
        )
    print(table(sys.argv[1]))
    plot(sys.argv[1], HERE.parent / "docs" / "rl-algorithms" / f"{sys.argv[1]}.png")
