"""How the matrices of a model's layers hold their weights: in the model's dtype, or quantised as they are loaded."""
