"""Check a copy of one of our files: what is still correct, what was changed, what is broken.

    python -m cleanrl_utils.check my_ppo.py                     # everything, two to five minutes
    python -m cleanrl_utils.check my_ppo.py --quick             # without speed and training
    python -m cleanrl_utils.check my_ppo.py --against ppo --changed "core 7" "core 13"
    python -m cleanrl_utils.check --run runs/<run>              # also while it trains

The file is compared with the one it grew out of: its implementation details, one by one, by the
tests of that file; the values and actions it learns in environments with known answers; what every
file promises (seeds, resume, evaluation, errors); its speed; and a short training run. Details that
were changed on purpose are named with --changed, or in the file: # [core 7 changed].
"""
