"""Tune the hyperparameters of an algorithm file on several environments at once, with Optuna.

    python -m cleanrl_utils.tuner scripts/tune_ppo.py
    python -m cleanrl_utils.tuner scripts/tune_ppo.py --workers 4 --storage postgresql+psycopg://...

Each trial samples flags with params_fn and trains with them on every environment and seed. The
score of a trial is the aggregate of its runs' scores, each normalized by the range of its
environment. The same command resumes the study. See docs/tuner.md.
"""

# tuner.py has the settings, scheduler.py the loop, trials.py the runs of a trial and their scores,
# flags.py what params_fn returns, study.py what tuners share, results.py plots, CSV, best flags

from cleanrl_utils.errors import explain

with explain("start the tuner"):
    from cleanrl_utils.tuner.tuner import Tuner

__all__ = ["Tuner"]
