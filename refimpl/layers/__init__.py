"""The building blocks of a transformer, each a small module over the operations of :mod:`refimpl.kernels.reference`."""
