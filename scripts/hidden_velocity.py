"""Gymnasium's pendulum without the velocity in its observations: a memory has to make up for it.

    PYTHONPATH=scripts python cleanrl/ppo_continuous_lstm.py \
        --env-id hidden_velocity:PendulumWithoutVelocity-v0
"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.pendulum import PendulumEnv


class PendulumWithoutVelocity(PendulumEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def _get_obs(self):
        return super()._get_obs()[:2]  # cosine and sine of the angle


gym.register(
    "PendulumWithoutVelocity-v0", entry_point=PendulumWithoutVelocity, max_episode_steps=200
)
