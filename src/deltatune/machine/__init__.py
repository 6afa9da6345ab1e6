"""The computer that deltatune runs on: device, BLAS, drivers, environment variables, files."""
