"""Sharded models in programs that leave the training loop to a framework: one module for each framework, imported by
its name. See docs/torch-frameworks.md."""
