"""The computer that deltatune runs on: device, BLAS, drivers, environment variables, files."""

from .command_line import end_at_signals

# This package is the first that is imported.
end_at_signals()
