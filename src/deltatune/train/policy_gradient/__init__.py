"""The policy gradient: the loss of sampled answers under the distribution that sampled them."""
