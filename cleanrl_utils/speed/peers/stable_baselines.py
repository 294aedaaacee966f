"""Run by cleanrl_utils.speed and scripts/train_peers.py: an algorithm of Stable-Baselines3, of
sb3-contrib or of SBX with our settings.

    python stable_baselines.py stable_baselines3 PPO '{"env_id": "CartPole-v1", ...}'

Prints its steps over time and its episodes. A file of ours as a last argument is where the
environments are made.
"""

import importlib
import json
import runpy
import sys
import time
from importlib.metadata import distributions

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize

library, algorithm, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
file = sys.argv[4] if sys.argv[4:] else None
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


class MaskApart(gym.Wrapper):
    """Observations of ppo_multidiscrete.py without the mask, which MaskablePPO asks for."""

    def __init__(self, env):
        super().__init__(env)
        size = env.observation_space.shape[0] - env.unwrapped.action_space.n
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)

    def split(self, obs):
        size = self.observation_space.shape[0]
        self.mask = obs[size:] > 0
        return obs[:size]

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.split(obs), info

    def step(self, action):
        obs, *others = self.env.step(action)
        return self.split(obs), *others

    def action_masks(self):
        return self.mask


def make_env():
    """One environment, as our file makes it."""
    ours = runpy.run_path(file)
    env = ours["make_envs"](ours["Args"](**settings), 1).unwrapped.envs[0]
    return MaskApart(env) if algorithm == "MaskablePPO" else env


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
    if algorithm == "RecurrentPPO":  # a shared LSTM would learn nothing from the value loss there
        networks = dict(lstm_hidden_size=128)
    theirs["clip_range_vf"] = settings["clip_coef"] if settings["clip_vloss"] else None
    theirs["target_kl"] = settings.get("target_kl")
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


def qrdqn_settings():
    theirs = dqn_settings()
    theirs["policy_kwargs"]["n_quantiles"] = settings["num_quantiles"]
    return theirs


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
    theirs = actor_critic_settings() | {"learning_rate": settings["policy_lr"]}
    return theirs | ({"qf_learning_rate": settings["q_lr"]} if library == "sbx" else {})


def tqc_settings():
    theirs = actor_critic_settings() | {"learning_rate": settings["learning_rate"]}
    theirs["top_quantiles_to_drop_per_net"] = settings["drop_quantiles"]
    networks = dict(n_quantiles=settings["num_quantiles"])
    if library == "sb3_contrib":  # SBX has two critics
        networks["n_critics"] = settings["num_critics"]
    theirs["policy_kwargs"] |= networks | dict(net_arch=dict(pi=[256] * 2, qf=[512] * 3))
    return theirs


def crossq_settings():
    theirs = actor_critic_settings() | {"learning_rate": settings["learning_rate"]}
    theirs["policy_delay"] = settings["policy_frequency"]
    theirs["policy_kwargs"]["net_arch"] = dict(pi=[256] * 2, qf=[settings["q_width"]] * 2)
    return theirs


def droq_settings():
    theirs = actor_critic_settings() | {"learning_rate": settings["learning_rate"]}
    theirs["policy_delay"] = settings["utd"]  # one update of the actor per step, after the others
    theirs["policy_kwargs"] |= dict(dropout_rate=settings["dropout"], layer_norm=True)
    return theirs


def actor_critic_settings():
    updates = {"train_freq": 1, "gradient_steps": settings["utd"] * settings["num_envs"]}
    return off_policy_settings([256, 256]) | updates


def off_policy_settings(hidden):
    names = "buffer_size", "learning_starts", "batch_size", "tau", "gamma"
    names = [name for name in names if name in settings]  # CrossQ has no target networks, no tau
    return same(*names) | {"policy_kwargs": dict(net_arch=hidden)}


SETTINGS = {
    "PPO": ppo_settings,
    "MaskablePPO": ppo_settings,
    "RecurrentPPO": ppo_settings,
    "DQN": dqn_settings,
    "QRDQN": qrdqn_settings,
    "TD3": td3_settings,
    "SAC": sac_settings,
    "TQC": tqc_settings,
    "CrossQ": crossq_settings,
    "DroQ": droq_settings,
}
POLICIES = {"RecurrentPPO": "MlpLstmPolicy"}

envs = settings["env_id"] if file is None else make_env
envs = make_vec_env(envs, n_envs=settings["num_envs"], seed=settings["seed"])
if algorithm in ("PPO", "RecurrentPPO") and isinstance(envs.action_space, Box):  # as our files do
    envs = VecNormalize(envs, gamma=settings["gamma"])
policy = POLICIES.get(algorithm, "MlpPolicy")
if isinstance(envs.observation_space, Dict):
    policy = "MultiInputPolicy"
theirs = SETTINGS[algorithm]() | dict(tensorboard_log="runs", seed=settings["seed"], device="cpu")
of_library = importlib.import_module(library)  # DroQ is its SAC with dropout
agent = getattr(of_library, "SAC" if algorithm == "DroQ" else algorithm)(policy, envs, **theirs)
agent.learn(settings["total_timesteps"], callback=Clock())

episodes = []  # (step, return, seconds)
logged = [envs.env_method(f"get_episode_{x}") for x in ("lengths", "rewards", "times")]
for lengths, returns, seconds in zip(*logged, strict=True):
    steps = np.cumsum(lengths, dtype=int) * settings["num_envs"]
    episodes += zip(steps.tolist(), map(float, returns), map(float, seconds), strict=True)
versions = {d.name: d.version for d in distributions()}
print(json.dumps({"marks": marks, "versions": versions, "episodes": sorted(episodes)}))
