"""Run by cleanrl_utils.speed: SB3's DQN with settings given as JSON; prints steps over time."""

import json
import sys
import time
from importlib.metadata import distributions

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

settings = json.loads(sys.argv[1])
torch.set_num_threads(1)
marks = []


class Clock(BaseCallback):
    def _on_rollout_start(self):
        marks.append((self.num_timesteps, time.time()))

    def _on_step(self):
        return True

    _on_training_end = _on_rollout_start


DQN(
    "MlpPolicy",
    make_vec_env(settings["env_id"], n_envs=settings["num_envs"], seed=settings["seed"]),
    learning_rate=settings["learning_rate"],
    buffer_size=settings["buffer_size"],
    learning_starts=settings["learning_starts"],
    batch_size=settings["batch_size"],
    tau=settings["tau"],
    gamma=settings["gamma"],
    train_freq=settings["train_frequency"],
    target_update_interval=settings["target_network_frequency"],
    exploration_fraction=settings["exploration_fraction"],
    exploration_initial_eps=settings["start_e"],
    exploration_final_eps=settings["end_e"],
    policy_kwargs=dict(net_arch=[120, 84]),
    tensorboard_log="runs",
    seed=settings["seed"],
    device="cpu",
).learn(settings["total_timesteps"], callback=Clock())
print(json.dumps({"marks": marks, "versions": {d.name: d.version for d in distributions()}}))
