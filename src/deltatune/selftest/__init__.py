"""`deltatune selftest` checks every part of deltatune on this machine, and writes the results to a file."""
