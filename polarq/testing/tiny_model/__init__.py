"""A random language model of half a million parameters, for a real inference engine on a CPU.

Its samples mean nothing, and that is the point: what is tested is that the ids and log-probabilities polarq records are
those of the engine. A random model samples ids that no re-encoding of its text would give back, so a proxy that takes
ids from text fails at once.
"""

from polarq.testing.tiny_model.checkpoint import TinyModel, make_tiny_model

__all__ = ["TinyModel", "make_tiny_model"]
