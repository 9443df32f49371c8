"""Work without a network, a home or a cache: what ships runs, what does not is refused in one line."""

import os
import subprocess
import sys

env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": "/proc/nowhere", "OMP_NUM_THREADS": "1"}
env |= {"XDG_CACHE_HOME": "/proc/none", "HF_HOME": "/proc/none"}


def kog(*argv):
    return subprocess.run([sys.executable, "-m", "kog_triton", *argv], env=env, capture_output=True, text=True)


done = kog("generate", "-p", "def f(x):", "-m", "4", "--temp", "0", "--quiet")
assert (done.returncode, done.stderr) == (0, "") and done.stdout, done
gone = kog("generate", "-p", "x", "--model", "nobody/nothing")
assert gone.returncode == 3 and gone.stdout == "", gone
said = [line for line in gone.stderr.splitlines() if line and not line.endswith(" ...")]  # but for progress
assert len(said) == 1 and "nobody/nothing" in said[0], gone.stderr
