"""The probes of tests/probes.py as PettingZoo games of two players, and games of their own.

Each image probe has the same id here: both players are in the same probe, and each is paid for its
own action. DuelProbe/... are games between the two. Importing this module is enough.
"""

import functools
from types import MappingProxyType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pettingzoo

from tests.probes import Probe


class Game(pettingzoo.ParallelEnv):
    """An action counts at the third of four frames, and an episode ends with the fourth.

    Only the blue of the screen is true.
    """

    metadata = MappingProxyType({"render_modes": []})
    possible_agents = ("left", "right")

    def __init__(self, probe, auto_rom_install_path, render_mode):
        self.probes = [probe() for _ in self.possible_agents]
        self.ale = SimpleNamespace(act=lambda actions: None, getScreenRGB=self.screen)

    def action_space(self, player):
        return self.probes[0].action_space

    def observation_space(self, player):
        return gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def screen(self):
        obs = np.atleast_1d(self.obs)
        stripes = (127.5 * (1 + obs))[np.arange(84) * np.size(obs) // 84].astype(np.uint8)
        return (
            np.stack([255 - stripes, np.full(84, 77), stripes], 1)[:, None]
            .repeat(84, 1)
            .astype(np.uint8)
        )

    def reset(self, seed=None, options=None):
        self.agents, self.frames = [*self.possible_agents], 0
        for probe in self.probes:
            self.obs, _ = probe.reset(seed=seed)
        return dict.fromkeys(self.agents, self.screen()), {player: {} for player in self.agents}

    def act(self, actions):
        """What each player gets, and who is out or cut off."""
        steps = [probe.step(action) for probe, action in zip(self.probes, actions, strict=True)]
        self.obs = steps[0][0]
        return list(zip(*steps, strict=True))[1:4]

    def step(self, actions):
        self.frames, playing, rewards = self.frames + 1, self.agents, (0, 0)
        if self.frames % 4 == 3:
            rewards, *self.ends = self.act([actions.get(player) for player in self.possible_agents])
        ends = self.ends if self.frames % 4 == 0 else ((False, False), (False, False))
        answers = [
            dict(zip(self.possible_agents, answer, strict=True)) for answer in (rewards, *ends)
        ]
        answers = [{player: answer[player] for player in playing} for answer in answers]
        self.agents = [
            player for player in playing if not answers[1][player] and not answers[2][player]
        ]
        return dict.fromkeys(playing, self.screen()), *answers, {player: {} for player in playing}


class Duel(Game):
    """Three steps. Action 1 takes two points from the other player, so that it never loses."""

    def __init__(self, probe=Probe, **settings):
        super().__init__(Probe, **settings)

    def act(self, actions):
        self.obs, right = self.obs + 0.25, [float(action == 1) for action in actions]
        return (
            [2 * right[0] - 2 * right[1], 2 * right[1] - 2 * right[0]],
            [self.obs[0] > 0.6] * 2,
            [False, False],
        )


class Seats(Duel):
    """One step that pays 1 for the left player's action 1 and the right one's 0; others cost 1."""

    def act(self, actions):
        return (
            [1.0 if actions[0] == 1 else -1.0, 1.0 if actions[1] == 0 else -1.0],
            [True, True],
            [False, False],
        )


class OneOut(Duel):
    """Reward 1 a step; the right player is out after one step, the left one is cut after three."""

    def act(self, actions):
        assert (actions[1] is None) == (self.obs[0] > 0), "who is out does not act"
        self.obs = self.obs + 0.25
        return [1.0, 1.0], [False, self.obs[0] > 0], [self.obs[0] > 0.6, False]


class FirstOut(Duel):
    """The left player is out after the first step, the right one after the third. It renders."""

    metadata = MappingProxyType({"render_modes": ["rgb_array"]})

    def act(self, actions):
        self.obs = self.obs + 0.25
        return [1.0, 1.0], [True, self.obs[0] > 0.6], [False, False]

    def render(self):
        return self.screen()


for env_id in [env_id for env_id in gym.registry if env_id.startswith("ImageProbe/")]:
    pettingzoo.register(
        "parallel", env_id, functools.partial(Game, gym.spec(env_id).vector_entry_point.args[0])
    )
for game in (Duel, Seats, OneOut, FirstOut):
    pettingzoo.register("parallel", f"DuelProbe/{game.__name__}-v0", game)
