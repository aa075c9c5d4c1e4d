"""Speculative decoding: tokens are drafted cheaply, and one pass of the model checks several. Its law stays as it is."""
