"""Computes losses and answers of a model while nothing trains, and finds where a number stopped being finite."""
