"""What deltatune knows of the computer under it: device, BLAS, drivers, environment variables, files."""
