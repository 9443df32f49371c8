"""A program under the operating system's limits: `python limited_process.py ...`, for what a stranger wrote.

    arguments    seconds that a request may take, bytes of address space, bytes of stack, characters that a reply may
                 have, the file whose `answer` replies, then the folders that its imports are looked for in
    standard input, one line of JSON a request; standard output, one line of JSON for each

It ends with its input; beyond a limit of time by SIGALRM, of memory with the status ENOMEM. It runs
by its path and imports nothing of the package.
"""

import errno
import importlib.util
import json
import os
import resource
import signal
import sys


def limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def main() -> None:
    seconds, memory, stack, max_chars = float(sys.argv[1]), *map(int, sys.argv[2:5])
    sys.path += sys.argv[6:]
    limit(resource.RLIMIT_STACK, stack)
    limit(resource.RLIMIT_AS, memory)
    limit(resource.RLIMIT_CORE, 0)
    # whatever the parent did with the signal: the kernel ends this process when time is up
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    found = importlib.util.spec_from_file_location("limited", sys.argv[5])
    assert found is not None and found.loader is not None, "the file is one of this folder"
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply = json.dumps(module.answer(json.loads(line), max_chars))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(errno.ENOMEM)
