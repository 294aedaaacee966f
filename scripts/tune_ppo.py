"""Tune ppo.py on CartPole-v1: the study behind the plots and figures of docs/tuner.md.

python -m cleanrl_utils.tuner scripts/tune_ppo.py
"""

import optuna

from cleanrl_utils.tuner import Tuner

num_trials, num_seeds = 25, 2


def params_fn(trial):
    return {
        "total-timesteps": 25_000,
        "learning-rate": trial.suggest_float("learning-rate", 1e-4, 1e-2, log=True),
        "num-steps": trial.suggest_categorical("num-steps", [32, 64, 128, 256]),
        "num-minibatches": trial.suggest_categorical("num-minibatches", [1, 2, 4, 8]),
        "update-epochs": trial.suggest_int("update-epochs", 1, 16),
        "gae-lambda": trial.suggest_float("gae-lambda", 0.8, 1.0),
        "clip-coef": trial.suggest_float("clip-coef", 0.1, 0.4),
        "ent-coef": trial.suggest_float("ent-coef", 1e-4, 0.05, log=True),
    }


tuner = Tuner(
    script="cleanrl/ppo.py",
    metric="charts/episodic_return",
    metric_last_n_average_window=50,
    target_scores={"CartPole-v1": [0, 500]},
    params_fn=params_fn,
    sampler=optuna.samplers.TPESampler(seed=1),
    study_name="ppo-cartpole",
    workers=2,
)

if __name__ == "__main__":
    tuner.tune(num_trials, num_seeds)
