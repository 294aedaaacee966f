"""Draw the Elo ratings of self-play's runs with default flags: results/ppo_pettingzoo_ma_atari/elo.json -> the docs' plot."""

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
runs = json.loads((HERE / "ppo_pettingzoo_ma_atari" / "elo.json").read_text())
rows = [run["rows"] for run in runs if run["flags"] == "--elo-games 32"]
steps, _, ratings, points = np.moveaxis(np.array(rows), 2, 0)  # each of shape (seeds, checkpoints)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
axes[0].set(xlabel="million steps", ylabel="Elo rating; 0 is the random player")
axes[1].set(xlabel="million steps", ylabel="points against the random player")
for axis, curves in zip(axes, (ratings, points), strict=True):
    axis.plot(steps.T / 1e6, curves.T, color="tab:blue", alpha=0.35, linewidth=0.8)
    axis.plot(steps[0] / 1e6, curves.mean(0), color="tab:blue", marker="o", markersize=3)
    axis.grid(alpha=0.3)
figure.savefig(HERE.parent / "docs" / "rl-algorithms" / "ppo_pettingzoo_ma_atari.png", dpi=110)
