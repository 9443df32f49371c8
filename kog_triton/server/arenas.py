"""How many arenas malloc may have in the server's processes.

glibc gives threads arenas of their own, up to eight a core, and keeps in each what was freed in it. A server whose
short-lived threads take turns in them grows for a long time without holding anything: the engine process by 9 MB in 400
answers by a grammar, whose memory in use stayed the same (two cores: 16 arenas). Python's own objects lie elsewhere.
"""

import ctypes
import os
import sys
from contextlib import suppress

M_ARENA_MAX = -8  # of malloc.h
MOST = 2  # the process's first thread has one, all others share one


def few_arenas() -> None:
    """In this process and those that it starts; to be called before its second thread starts.

    MALLOC_ARENA_MAX in the environment is the user's own choice. Other C libraries than glibc have no arenas.
    """
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return
    os.environ["MALLOC_ARENA_MAX"] = str(MOST)
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MOST)
