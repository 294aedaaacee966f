"""Run by scripts/train_peers.py: Brax's own PPO with our settings; prints its steps over time and
the mean return of its last 100 episodes after each update (one row each)."""

import json
import sys
import time
from importlib.metadata import distributions

from brax import envs
from brax.training.agents.ppo import train

settings = json.loads(sys.argv[1])
num_steps = settings["num_envs"] * settings["num_steps"]  # of one update
start_time = time.time()
marks, episodes = [], []


def log(step, metrics):
    marks.append((step, time.time()))
    if "episode/sum_reward" in metrics:
        episodes.append((step, float(metrics["episode/sum_reward"]), time.time() - start_time))


# its networks are its own; it neither anneals the learning rate nor clips the values
train.train(
    envs.get_environment(
        settings["env_id"].removeprefix("brax/"), backend=settings["physics"] or "spring"
    ),
    num_timesteps=settings["total_timesteps"] // num_steps * num_steps,
    episode_length=settings["episode_length"] or 1000,
    num_envs=settings["num_envs"],
    unroll_length=settings["num_steps"],
    batch_size=settings["num_envs"] // settings["num_minibatches"],
    num_minibatches=settings["num_minibatches"],
    num_updates_per_batch=settings["update_epochs"],
    learning_rate=settings["learning_rate"],
    discounting=settings["gamma"],
    gae_lambda=settings["gae_lambda"],
    clipping_epsilon=settings["clip_coef"],
    entropy_cost=settings["ent_coef"],
    vf_loss_coefficient=settings["vf_coef"],
    max_grad_norm=settings["max_grad_norm"],
    normalize_advantage=settings["norm_adv"],
    normalize_observations=True,
    reward_scaling=0.125,  # ours divides by the deviation of discounted returns, 6.5 to 8.6 here
    bootstrap_on_timeout=True,  # as ours does
    seed=settings["seed"],
    run_evals=False,
    log_training_metrics=True,
    training_metrics_steps=num_steps,
    progress_fn=log,
)
versions = {d.name: d.version for d in distributions()}
told = {"marks": marks, "versions": versions, "episodes": episodes}
print(json.dumps(told | {"rows": "means of 100 episodes"}))
