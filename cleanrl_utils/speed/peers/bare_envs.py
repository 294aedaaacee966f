"""Step the environments of one of our files with precomputed actions: the upper bound."""

import json
import runpy
import sys
import time

import gymnasium as gym

settings = json.loads(sys.argv[1])
ours = runpy.run_path(sys.argv[2])
envs = ours["make_envs"](ours["Args"](**settings), settings["num_envs"])
envs.reset(seed=settings["seed"])
space = gym.vector.utils.batch_space(envs.single_action_space, settings["num_envs"])
space.seed(settings["seed"])  # EnvPool's own is that of one environment
num_steps = settings["total_timesteps"] // settings["num_envs"]
actions = [space.sample() for _ in range(num_steps)]

marks = []
for t in range(num_steps):
    marks.append((t * settings["num_envs"], time.time()))
    envs.step(actions[t])
marks.append((num_steps * settings["num_envs"], time.time()))
print(json.dumps({"marks": marks}))
