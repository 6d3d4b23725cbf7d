"""What can go wrong while weights travel, one type for each thing a caller would do differently.

Every text names the version and the object it is about; what the far side said is kept word for word. None of these leaves live
weights changed: they are raised while an update is fetched, checked or staged, never half-way through a commit.
"""

from common.errors import RoseError


class TransferError(RoseError):
    """Base of everything below: the update at hand did not arrive, the old weights are whole."""


class TransferTimeoutError(TransferError):
    """Nothing came within the time allowed. Trying again is safe."""


class OutcomeUnknownError(TransferError):
    """The link broke after a request was sent and before its answer: the far side may or may not have done it.

    Objects are immutable, so sending the same thing again is safe and settles the question.
    """


class FarSideError(TransferError):
    """The far side refused or failed; the text is its own."""


class AuthenticationError(TransferError):
    """A missing or wrong token, or a manifest whose signature does not fit. Trying again does not help."""


class VersionGoneError(TransferError):
    """The version was pruned or withdrawn. Choose another path, usually a full anchor."""


class WrongBaseError(TransferError):
    """The update is a difference to a version other than the one held here."""


class LayoutMismatchError(TransferError):
    """Names, shapes or dtypes differ between the two sides, or a tensor has no counterpart."""


class MalformedUpdateError(TransferError):
    """Bytes that no honest encoder writes: a length, an index, a header or a name out of its bounds."""


class TruncatedError(MalformedUpdateError):
    """Fewer bytes than announced."""


class ChecksumError(TransferError):
    """Bytes that changed on the way: fetch them again."""


class FingerprintMismatchError(TransferError):
    """The decoded weights are not those of the sender: what is held here differs from the base, or the sender erred."""


class UnreachableError(TransferTimeoutError):
    """The far side cannot be reached; nothing was sent."""
