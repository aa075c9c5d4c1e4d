"""From a name or path to a model with weights: checkpoints in safetensors or GGUF, the embedded model, random weights."""
