"""`python -m kog_triton.bench`."""

import sys

from kog_triton.bench.cli import main

sys.exit(main())
