"""Sharded models in programs whose training loop is a framework's. Each framework has its own module, which programs
import by name. See docs/torch-frameworks.md."""
