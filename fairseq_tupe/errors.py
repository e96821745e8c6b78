"""The one exception that tells a user about bad input."""


class TupeError(ValueError):
    """Bad input or a setting that can't work; the message is one line that names what was found and expected."""
