"""Run by cleanrl_utils.speed: SB3's TD3 or SAC with settings as JSON; prints steps over time."""

import json
import sys
import time
from importlib.metadata import distributions

import numpy as np
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise

settings = json.loads(sys.argv[1])
torch.set_num_threads(1)
marks = []


class Clock(BaseCallback):
    def _on_rollout_start(self):
        marks.append((self.num_timesteps, time.time()))

    def _on_step(self):
        return True

    _on_training_end = _on_rollout_start


envs = make_vec_env(settings["env_id"], n_envs=settings["num_envs"], seed=settings["seed"])
if "policy_noise" in settings:
    sigma = np.full(envs.action_space.shape, settings["exploration_noise"])
    algorithm, own = (
        TD3,
        {
            "learning_rate": settings["learning_rate"],
            "policy_delay": settings["policy_frequency"],
            "target_policy_noise": settings["policy_noise"],
            "target_noise_clip": settings["noise_clip"],
            "action_noise": NormalActionNoise(np.zeros_like(sigma), sigma),
        },
    )
else:  # one actor update per step; ours makes policy_frequency updates every policy_frequency steps
    algorithm, own = SAC, {"learning_rate": settings["policy_lr"]}
algorithm(
    "MlpPolicy",
    envs,
    buffer_size=settings["buffer_size"],
    learning_starts=settings["learning_starts"],
    batch_size=settings["batch_size"],
    tau=settings["tau"],
    gamma=settings["gamma"],
    train_freq=1,
    gradient_steps=settings["utd"] * settings["num_envs"],
    policy_kwargs=dict(net_arch=[256, 256]),
    tensorboard_log="runs",
    seed=settings["seed"],
    device="cpu",
    **own,
).learn(settings["total_timesteps"], callback=Clock())
print(json.dumps({"marks": marks, "versions": {d.name: d.version for d in distributions()}}))
