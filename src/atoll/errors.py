"""What Atoll raises when the user, not Atoll, can mend it: one clear sentence, no traceback needed."""


class AtollError(Exception):
    """Base of all errors meant for the user; the command line prints the sentence and exits non-zero."""


class InputError(AtollError, ValueError):
    """An argument, image, label or model output is not what was asked for."""


class RecipeError(AtollError):
    """A recipe is wrong; the message lists every fault found, not just the first."""


class DataError(AtollError):
    """A data file is missing, broken, truncated or not the one expected."""


class CheckpointError(AtollError):
    """A checkpoint cannot be written, read, or does not belong to this model."""


class CaptureError(AtollError):
    """A model cannot be captured as a graph: it draws random numbers, branches on data or changes itself."""


class UnsoundError(AtollError):
    """A certificate was broken by an attack: a bug of Atoll; the point is kept."""


class TrainingError(AtollError):
    """Training cannot go on (NaN, lost worker, full disk); the last good checkpoint is intact."""
