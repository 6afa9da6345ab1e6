"""What clang says of the kernels as a Mac gets them: errors, conversions, arrays on the stack and registers."""
