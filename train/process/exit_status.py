"""The exit statuses of the trainer and its tools."""

SUCCESS = 0
STOPPED = 1  # ended before its last step, or without its last checkpoint
WRONG_USAGE = 2  # the command line, the configuration or the data are not valid
CRASHED = 70  # an unexpected error (EX_SOFTWARE)
# Saved after SIGTERM or SIGHUP, or another process failed or could not be reached
RESUME = 75  # (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C, as shells report it

DELIBERATE = (SUCCESS, STOPPED, WRONG_USAGE, INTERRUPTED)  # the last line says how to go on
SIGNALED = 128  # plus the number of the signal that ended a process, as shells report it
