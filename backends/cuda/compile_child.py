"""The process that compiles one kernel: the job as a line of JSON and the source on stdin, the cubin on stdout.

NVRTC compiles one program of a process at a time, so that kernels compile side by side in processes of their own alone.
This one ends with the process that began it, however that ends. What the compiler says of an error goes to stderr.
"""

import json
import os
import sys

from kog_triton.backends.cuda.toolchain import die_with_parent, translate
from kog_triton.errors import DeviceError

REFUSED = 3  # exit code: the compiler refuses, and stderr says why


def main() -> int:
    die_with_parent()
    job = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != job["parent"]:  # which ended before it could be asked for
        return REFUSED
    text = sys.stdin.buffer.read().decode()
    try:
        cubin = translate(text, job["source"], job["flags"], job["compiler"])
    except DeviceError as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
