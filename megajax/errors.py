"""The user's mistakes: one sentence each, exit status 2, never a traceback."""


class UserError(ValueError):
    """A mistake that the user can correct; the message is one sentence that says how."""


class ConfigError(UserError):
    """A config key is unknown, has a bad value, or does not go together with another one."""


class InputError(UserError):
    """A file or directory that the run needs is missing, damaged or does not fit the config."""
