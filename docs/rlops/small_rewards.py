"""CartPole-v1 whose steps pay a thousandth: what normalized advantages make no difference to."""

import gymnasium as gym


def make(**settings):
    return gym.wrappers.TransformReward(
        gym.make("CartPole-v1", **settings), lambda reward: reward / 1000
    )


gym.register("SmallRewards-v1", make)
