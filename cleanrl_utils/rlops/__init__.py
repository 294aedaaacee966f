"""Did this change help? Compare runs: learning curves, final returns and their significance.

    python -m cleanrl_utils.rlops --exp-name ppo --tags v1 v2 --report
    python -m cleanrl_utils.rlops --filters 'ppo?tag=v1' 'ppo?norm_adv=False&cl=not normalized'

The first side is the baseline. Writes compare.png, compare.md, compare.csv and compare-runs.csv,
and with --report the self-contained page compare.html. Runs come from the folders in --runs or,
with --wandb-project-name, from Weights & Biases.
"""
