"""One command that tries everything of deltatune on the machine at hand, and writes down what came out."""
