"""Speculative decoding: tokens are drafted cheaply, and one pass of the model checks several of them. The law stays as it is."""
