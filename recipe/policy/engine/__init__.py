"""Engine for decoding at the speed of a GPU: one captured CUDA graph a token, LoRA in place, sampling inside."""
