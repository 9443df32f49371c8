"""Greedy requests with short prompts, one a slot, to a backend whose waiting prompts share a pass: served at once."""

from kog_triton.backends.mailbox import Mailbox, Request, Step
from tests.lib.cuda_requests import GREEDY

PROMPTS = {0: (5, 6), 1: (7, 9, 40, 33), 2: tuple(range(3, 24)), 3: tuple(range(40, 12, -1))}


def asked(slot, count=3, cached=0, **others):
    return Request(slot, PROMPTS[slot], GREEDY, 0, count, frozenset(), cached=cached, **others)


def said(mailbox, slot):
    return [s.token for s in mailbox.read(slot, 0) if isinstance(s, Step) and s.token >= 0]


def served(backend, *requests):
    mailbox = Mailbox()
    for request in requests:
        mailbox.post(request)
    backend.generate(mailbox)
    return mailbox
