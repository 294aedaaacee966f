import sys

import tyro

from cleanrl_utils import benchmark
from cleanrl_utils.benchmark.runner import Args, main

if __name__ == "__main__":
    name = "python -m cleanrl_utils.benchmark"
    sys.exit(main(tyro.cli(Args, prog=name, description=benchmark.__doc__)))
