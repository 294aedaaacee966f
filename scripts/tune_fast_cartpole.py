"""Tune ppo_jax.py to reach 475 on CartPole-v1 soon: the settings of benchmark/fast/cartpole.sh.

python -m cleanrl_utils.tuner scripts/tune_fast_cartpole.py
"""

import optuna

from cleanrl_utils.tuner import Tuner

num_trials, num_seeds = 36, 2


def params_fn(trial):
    return {
        "total-timesteps": 65_536,
        "num-envs": trial.suggest_categorical("num-envs", [4, 8, 16, 32]),
        "num-steps": trial.suggest_categorical("num-steps", [32, 64, 128]),
        "num-minibatches": trial.suggest_categorical("num-minibatches", [1, 2, 4, 8]),
        "update-epochs": trial.suggest_int("update-epochs", 2, 12),
        "learning-rate": trial.suggest_float("learning-rate", 5e-4, 1e-2, log=True),
        "gae-lambda": trial.suggest_float("gae-lambda", 0.8, 0.98),
        "gamma": trial.suggest_categorical("gamma", [0.98, 0.99]),
        "clip-coef": trial.suggest_float("clip-coef", 0.1, 0.4),
        "ent-coef": trial.suggest_float("ent-coef", 1e-4, 0.02, log=True),
    }


tuner = Tuner(
    script="cleanrl/ppo_jax.py",
    metric="charts/episodic_return",
    metric_last_n_average_window=100,
    target_scores={"CartPole-v1": [0, 500]},
    params_fn=params_fn,
    sampler=optuna.samplers.TPESampler(seed=1),
    study_name="fast-cartpole",
)

if __name__ == "__main__":
    tuner.tune(num_trials, num_seeds)
