"""Run an algorithm file on several environments and seeds, a few runs at a time, and lose none of them.

    python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \\
        --command "python cleanrl/ppo.py --no-cuda" --num-seeds 3 --workers 2

Runs that crash are tried again, from their last checkpoint; so are those that Ctrl+C, a kill or a power cut stopped, when the
same command is given again. What is finished is not run again. docs/benchmark.md has the rest.
"""
