"""Run by cleanrl_utils.speed: SB3's PPO with settings given as JSON; prints steps over time."""

import json
import sys
import time
from importlib.metadata import distributions

import torch
from gymnasium.spaces import Box
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

settings = json.loads(sys.argv[1])
torch.set_num_threads(1)
marks = []
envs = make_vec_env(settings["env_id"], n_envs=settings["num_envs"], seed=settings["seed"])
if isinstance(envs.action_space, Box):  # as our files for continuous actions do
    envs = VecNormalize(envs, gamma=settings["gamma"])


class Clock(BaseCallback):
    def _on_rollout_start(self):
        marks.append((self.num_timesteps, time.time()))

    def _on_step(self):
        return True

    _on_training_end = _on_rollout_start


PPO(
    "MlpPolicy",
    envs,
    learning_rate=lambda left: settings["learning_rate"] * (left if settings["anneal_lr"] else 1),
    n_steps=settings["num_steps"],
    batch_size=settings["num_envs"] * settings["num_steps"] // settings["num_minibatches"],
    n_epochs=settings["update_epochs"],
    gamma=settings["gamma"],
    gae_lambda=settings["gae_lambda"],
    clip_range=settings["clip_coef"],
    clip_range_vf=settings["clip_coef"] if settings["clip_vloss"] else None,
    normalize_advantage=settings["norm_adv"],
    ent_coef=settings["ent_coef"],
    vf_coef=settings["vf_coef"],
    max_grad_norm=settings["max_grad_norm"],
    target_kl=settings["target_kl"],
    policy_kwargs=dict(net_arch=dict(pi=[64, 64], vf=[64, 64]), activation_fn=torch.nn.Tanh),
    tensorboard_log="runs",
    seed=settings["seed"],
    device="cpu",
).learn(settings["total_timesteps"], callback=Clock())
print(json.dumps({"marks": marks, "versions": {d.name: d.version for d in distributions()}}))
