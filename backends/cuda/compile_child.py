"""The process that compiles one kernel: the job as a line of JSON and the source on stdin, the cubin on stdout.

NVRTC compiles one program of a process at a time, so that kernels compile side by side in processes of their own alone.
This one ends with the process that began it, however that ends. What the compiler says of an error goes to stderr.
"""

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)
REFUSED = 3  # exit code: the compiler refuses, and stderr says why


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    die_with_parent()
    job = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != job["parent"]:  # which ended before it could be asked for
        return REFUSED
    from kog_triton.backends.cuda.jit import translate
    from kog_triton.errors import DeviceError

    text = sys.stdin.buffer.read().decode()
    try:
        cubin = translate(text, job["source"], job["arch"], job["compiler"])
    except DeviceError as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
