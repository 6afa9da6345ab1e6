"""What deltatune knows about the computer that it runs on: device, BLAS, drivers, environment variables, files."""
