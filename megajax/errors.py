"""The user's mistakes: one sentence each, exit status 2, never a traceback."""


class UserError(ValueError):
    """A mistake that the user can correct; the message is one sentence with the correction."""


class ConfigError(UserError):
    """A config key is unknown, has a bad value, or cannot be combined with another key."""


class InputError(UserError):
    """A file or directory that the run needs is missing, damaged or does not fit the config."""
