"""Did this change help? Compare runs of one file, or of several: curves, final returns, and what they say beyond the noise.

    python -m cleanrl_utils.rlops --exp-name ppo --tags v1 v2 --report
    python -m cleanrl_utils.rlops --filters 'ppo?tag=v1' 'ppo?norm_adv=False&cl=not normalized' --env-ids CartPole-v1

The first side is what the others are compared with. Writes compare.png, compare.md, compare.csv and compare-runs.csv, and with
--report the page compare.html, which needs nothing but itself. Runs come from the folders in --runs, or from Weights & Biases
where its project is named.
"""
