"""Run by cleanrl_utils.speed: an algorithm of Stable-Baselines3 or SBX with our settings.

    python stable_baselines.py stable_baselines3 PPO '{"env_id": "CartPole-v1", ...}'

Prints its steps over time.
"""

import importlib
import json
import sys
import time
from importlib.metadata import distributions

import numpy as np
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize

library, algorithm, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
marks = []


class Clock(BaseCallback):
    def _on_rollout_start(self):
        marks.append((self.num_timesteps, time.time()))

    def _on_step(self):
        return True

    _on_training_end = _on_rollout_start


def same(*names):
    """The settings that have the same name there."""
    return {name: settings[name] for name in names}


def ppo_settings():
    num_transitions = settings["num_envs"] * settings["num_steps"]
    theirs = same("gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
    theirs |= {
        "learning_rate": annealed_learning_rate,
        "n_steps": settings["num_steps"],
        "batch_size": num_transitions // settings["num_minibatches"],
        "n_epochs": settings["update_epochs"],
        "clip_range": settings["clip_coef"],
        "normalize_advantage": settings["norm_adv"],
    }
    networks = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]))
    if library == "sbx":  # it ignores clip_range_vf, and uses target_kl differently
        import flax

        networks |= {"activation_fn": flax.linen.tanh, "ortho_init": True}
        return theirs | {"policy_kwargs": networks}
    theirs["clip_range_vf"] = settings["clip_coef"] if settings["clip_vloss"] else None
    theirs["target_kl"] = settings["target_kl"]
    return theirs | {"policy_kwargs": networks | {"activation_fn": torch.nn.Tanh}}


def annealed_learning_rate(share_left):
    return settings["learning_rate"] * (share_left if settings["anneal_lr"] else 1)


def dqn_settings():
    return off_policy_settings([120, 84]) | {
        "learning_rate": settings["learning_rate"],
        "train_freq": settings["train_frequency"],
        "target_update_interval": settings["target_network_frequency"],
        "exploration_fraction": settings["exploration_fraction"],
        "exploration_initial_eps": settings["start_e"],
        "exploration_final_eps": settings["end_e"],
    }


def td3_settings():
    sigma = np.full(envs.action_space.shape, settings["exploration_noise"])
    return actor_critic_settings() | {
        "learning_rate": settings["learning_rate"],
        "policy_delay": settings["policy_frequency"],
        "target_policy_noise": settings["policy_noise"],
        "target_noise_clip": settings["noise_clip"],
        "action_noise": NormalActionNoise(np.zeros_like(sigma), sigma),
    }


def sac_settings():
    # one actor update per step; ours makes policy_frequency updates every policy_frequency steps
    return actor_critic_settings() | {"learning_rate": settings["policy_lr"]}


def actor_critic_settings():
    updates = {"train_freq": 1, "gradient_steps": settings["utd"] * settings["num_envs"]}
    return off_policy_settings([256, 256]) | updates


def off_policy_settings(hidden):
    names = "buffer_size", "learning_starts", "batch_size", "tau", "gamma"
    return same(*names) | {"policy_kwargs": dict(net_arch=hidden)}


envs = make_vec_env(settings["env_id"], n_envs=settings["num_envs"], seed=settings["seed"])
if algorithm == "PPO" and isinstance(envs.action_space, Box):  # as our files do
    envs = VecNormalize(envs, gamma=settings["gamma"])
theirs = dict(PPO=ppo_settings, DQN=dqn_settings, TD3=td3_settings, SAC=sac_settings)[algorithm]()
theirs |= dict(tensorboard_log="runs", seed=settings["seed"], device="cpu")
agent = getattr(importlib.import_module(library), algorithm)("MlpPolicy", envs, **theirs)
agent.learn(settings["total_timesteps"], callback=Clock())
print(json.dumps({"marks": marks, "versions": {d.name: d.version for d in distributions()}}))
