"""Errors that a user can act on: each message is one line that names the item and what to do.

KogError
  ModelError    a checkpoint, its files or its configuration        exit code 3
  DeviceError   no usable device, too little memory, no backend     exit code 4
  RunError      a run that failed: NaN, a wait that expired         exit code 5
  RequestError  a prompt or a parameter of one request              exit code 2
"""


class KogError(Exception):
    """Base of every error that is the user's to fix; `exit_code` is what a command ends with."""

    exit_code = 1


class ModelError(KogError):
    exit_code = 3


class DeviceError(KogError):
    exit_code = 4


class RunError(KogError):
    exit_code = 5


class RequestError(KogError, ValueError):
    exit_code = 2
