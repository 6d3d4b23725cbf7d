"""Error types that callers tell apart. A user's mistake is a ValueError; these are the rest."""


class RoseError(Exception):
    """Base of all errors that ROSE raises on purpose."""


class CheckpointError(RoseError):
    """A model checkpoint that cannot be used; the text names file, tensor and both shapes."""


class RequestRejectedError(RoseError):
    """A request that can never run (too long, empty, unknown token): it fails alone, nothing else is touched."""


class EngineClosedError(RoseError):
    """The engine was closed, or its loop stopped, with this request unfinished."""


class RolloutError(RoseError):
    """Episodes that keep failing, so that a batch or a demonstration cannot be completed."""


class ReplicaUnavailableError(RoseError):
    """A replica that takes no request now: it has no weights yet, or is draining. Nothing was queued; go elsewhere or retry."""
