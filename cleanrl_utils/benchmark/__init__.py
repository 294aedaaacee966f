"""Run an algorithm file on several environments and seeds, several runs at a time.

    python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \\
        --command "python cleanrl/ppo.py --no-cuda" --num-seeds 3 --workers 2

Runs that crash are retried from their last checkpoint. After Ctrl+C or a kill, the same command
resumes the interrupted runs and skips the finished ones. See docs/benchmark.md.
"""
