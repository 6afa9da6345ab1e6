"""Softmax attention that trains in linear memory, with gradients for every input. See README.md here."""
