"""Step the environments of one of our files with precomputed actions: the upper bound."""

import json
import runpy
import sys
import time

settings = json.loads(sys.argv[1])
ours = runpy.run_path(sys.argv[2])
envs = ours["make_envs"](ours["Args"](**settings), settings["num_envs"])
envs.reset(seed=settings["seed"])
envs.action_space.seed(settings["seed"])
num_steps = settings["total_timesteps"] // settings["num_envs"]
actions = [envs.action_space.sample() for _ in range(num_steps)]

marks = []
for t in range(num_steps):
    marks.append((t * settings["num_envs"], time.time()))
    envs.step(actions[t])
marks.append((num_steps * settings["num_envs"], time.time()))
print(json.dumps({"marks": marks}))
