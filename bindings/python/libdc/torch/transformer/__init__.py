"""The transformer layer as PyTorch modules. Nothing is imported here: libdc.torch has the public names."""
