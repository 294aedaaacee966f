import sys

from cleanrl_utils import benchmark
from cleanrl_utils.benchmark.plan import parse_args
from cleanrl_utils.benchmark.runner import main

if __name__ == "__main__":
    sys.exit(main(parse_args(benchmark.__doc__)))
